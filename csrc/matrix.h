// Weight matrices in the kernels' layout: panels of 16 rows, interleaved so that a vector holds all rows of a panel and
// no sum ever crosses lanes. The file's values are kept bit for bit; only their order changes.
//
//     matrix [rows N, cols K]     panel p: rows 16p to 16p + 15 (rows from N on are zeros)
//     panel                       S segments of the sum, each a run of groups in ascending k
//
//     format                group   of a group, for each of 16 rows                                activations
//     F32, F16              1       one number                                                    ACT_F32
//     BF16                  2       a pair                                                        ACT_BF16 or ACT_F32
//     Q4_0 Q4_1 Q5_0 Q5_1   32      4- or 5-bit q, float16 scale (and minimum)                     ACT_Q8_32
//     Q8_0 IQ4_NL MXFP4     32      bytes; table of 16 values; float16 or power-of-two scale       ACT_Q8_32
//     Q2_K .. Q6_K, IQ4_XS  256     2- to 6-bit q, 8-bit scales (and minima) per 16 or 32,         ACT_Q8_256
//     TERNARY               256     float16 scale (and one of the minima)
#pragma once

#include <cstdint>

namespace kvasir {

enum Format : int32_t {
    FORMAT_F32 = 0,
    FORMAT_F16 = 1,
    FORMAT_BF16 = 2,
    FORMAT_Q4_0 = 3,
    FORMAT_Q4_1 = 4,
    FORMAT_Q5_0 = 5,
    FORMAT_Q5_1 = 6,
    FORMAT_Q8_0 = 7,
    FORMAT_IQ4_NL = 8,
    FORMAT_MXFP4 = 9,
    FORMAT_Q2_K = 10,
    FORMAT_Q3_K = 11,
    FORMAT_Q4_K = 12,
    FORMAT_Q5_K = 13,
    FORMAT_Q6_K = 14,
    FORMAT_IQ4_XS = 15,
    FORMAT_TERNARY = 16,
    FORMAT_COUNT = 17,
};

// The format that a matrix's input rows are converted to.
enum Activation : int32_t {
    ACT_F32 = 0,     // unchanged
    ACT_BF16 = 1,    // rounded to bfloat16
    ACT_Q8_32 = 2,   // int8 in [-127, 127] and a float32 scale per 32
    ACT_Q8_256 = 3,  // the same per 256
};

constexpr int64_t PANEL = 16;

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
    if (format < FORMAT_Q4_0) return 1;
    return format < FORMAT_Q2_K ? 32 : 256;
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
