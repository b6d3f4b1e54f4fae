// Weight matrices in the kernels' layout: panels of 16 rows, interleaved so that a vector holds all rows of a panel and
// no sum ever crosses lanes. The file's values are kept bit for bit; only their order changes.
//
//     matrix [rows N, cols K]     panel p: rows 16p to 16p + 15 (rows from N on are zeros)
//     panel                       S segments of the sum, each a run of groups in ascending k
//
//     format                group   of a group, for each of 16 rows                                activations
//     F32, F16              1       one number                                                    ACT_F32
//     BF16                  2       a pair                                                        ACT_BF16 or ACT_F32
//     FP8                   128     E4M3 in pairs; float32 scale                                  ACT_BF16 or ACT_F32
//     Q4_0 Q4_1 Q5_0 Q5_1   32      4- or 5-bit q, float16 scale (and minimum)                     ACT_Q8_32
//     Q8_0 IQ4_NL MXFP4     32      bytes; table of 16 values; float16 or power-of-two scale       ACT_Q8_32
//     INT4 INT8 NF4         64      4- or 8-bit q, table of 16 values; float32 scale               ACT_Q8_32
//     INT4_ZP .. AFFINE8    64      4- or 8-bit q; 16-bit scale and zero point, or scale and bias  ACT_Q8_32
//     NVFP4                 64      table of 16 values; scale per 16, and a float32 scale          ACT_Q8_32
//     Q2_K .. Q6_K, IQ4_XS  256     2- to 6-bit q, 8-bit scales (and minima) per 16 or 32,         ACT_Q8_256
//     TERNARY               256     float16 scale (and one of the minima)
#pragma once

#include <cstdint>

namespace kvasir {

enum Format : int32_t {
    FORMAT_F32 = 0,
    FORMAT_F16 = 1,
    FORMAT_BF16 = 2,
    FORMAT_FP8 = 3,
    FORMAT_Q4_0 = 4,
    FORMAT_Q4_1 = 5,
    FORMAT_Q5_0 = 6,
    FORMAT_Q5_1 = 7,
    FORMAT_Q8_0 = 8,
    FORMAT_IQ4_NL = 9,
    FORMAT_MXFP4 = 10,
    FORMAT_INT4 = 11,
    FORMAT_INT8 = 12,
    FORMAT_INT4_ZP = 13,
    FORMAT_INT8_ZP = 14,
    FORMAT_AFFINE4 = 15,
    FORMAT_AFFINE8 = 16,
    FORMAT_NF4 = 17,
    FORMAT_NVFP4 = 18,
    FORMAT_Q2_K = 19,
    FORMAT_Q3_K = 20,
    FORMAT_Q4_K = 21,
    FORMAT_Q5_K = 22,
    FORMAT_Q6_K = 23,
    FORMAT_IQ4_XS = 24,
    FORMAT_TERNARY = 25,
    FORMAT_COUNT = 26,
};

// The format that a matrix's input rows are converted to.
enum Activation : int32_t {
    ACT_F32 = 0,     // unchanged
    ACT_BF16 = 1,    // rounded to bfloat16
    ACT_Q8_32 = 2,   // int8 in [-127, 127] and a float32 scale per 32
    ACT_Q8_256 = 3,  // the same per 256
};

constexpr int64_t PANEL = 16;
constexpr int64_t FP8_SCALES = 4 * PANEL;  // bytes of the scales that precede a group of FP8

struct Matrix {
    int32_t format;
    int32_t activation;
    int32_t segments;  // S: a power of two up to 8; each segment is cols / S columns, padded to whole groups
    int32_t reserved;
    int64_t rows, cols;
    const uint8_t* data;
};

static inline int64_t group_of(int32_t format) {
    if (format == FORMAT_BF16) return 2;
    if (format == FORMAT_FP8) return 128;
    if (format < FORMAT_Q4_0) return 1;
    return format < FORMAT_INT4 ? 32 : format < FORMAT_Q2_K ? 64 : 256;
}

// Columns of one segment with its padding.
static inline int64_t segment_cols(const Matrix& m) {
    const int64_t group = group_of(m.format), cols = m.cols / m.segments;
    return (cols + group - 1) / group * group;
}

static inline int64_t panels(const Matrix& m) { return (m.rows + PANEL - 1) / PANEL; }

// Columns of all segments with their padding.
static inline int64_t padded_cols(const Matrix& m) { return m.segments * segment_cols(m); }

// pack_float.h and pack_int.h, joined in pack.cpp, for all instruction sets.
int64_t panel_bytes(const Matrix& m);
// Bytes of one row converted to the matrix's activations: a multiple of 64, so that rows stay aligned.
int64_t activated_bytes(const Matrix& m);

}  // namespace kvasir
