// The memory layout of integer formats: the blocks of packed weights, and the groups of quantized activations.
//
// A block holds 16 rows (a panel) by 64 or 256 columns. Each number of a row, of `bits` bits, becomes an unsigned
// level, whose lower and upper bits are in separate planes. A vector of a plane of b bits is 64 bytes, four columns of
// each row: byte 4 r + c is row r, and its field j (b bits, lowest first) is column 4 j + c. So one shift and one mask
// give the operand of the byte dot products, and no sum crosses rows.
//
//     64 columns (two groups of 32)      planes | scales [2][16] | minima [2][16]        two bytes each
//     64 columns (one group)             planes | scales [16] | minima or zero points [16]    two bytes each
//                                        planes | scales [16]                             float32
//                                        planes | scales [4][16] | d [16]                 NVFP4: bytes, float32
//     256 columns (a super-block)        planes | scales [256 / sub][16] | minima [4][16][2] | d [16] | dmin [16]
//
// Scales and minima of super-blocks are bytes, d and dmin float16. Q2_K keeps a scale and a minimum in the nibbles of
// one byte, in pairs as minima are: [8][16][2]. Blocks are padded to whole cache lines. An odd last group of 32 gets
// an empty neighbour (scale 0).
#pragma once

#include "matrix.h"
#include "outliers.h"

namespace kvasir {

enum ScaleKind : int32_t {
    SCALE_F16,      // per 32 columns
    SCALE_BF16,     // per 32 columns: powers of two beyond the range of float16; per 64: any
    SCALE_F32,      // per 64 columns
    SCALE_E5M3,     // per 16 columns: bytes (e, m) that mean (1 + m / 8) 2^(e - 10), times a float32 d per 64
    SCALE_U8,       // bytes, times a float16 d per super-block
    SCALE_I8,       // the same, signed
    SCALE_NIBBLES,  // scale and minimum in one byte
    SCALE_ONE,      // d alone
};

struct IntLayout {
    int32_t cols;                 // of a block: 64 or 256
    int32_t sub;                  // columns per scale: 16, 32 or 64
    int32_t low_bits, high_bits;  // of the two planes
    int32_t zero;                 // the level that means 0
    ScaleKind scale;
    bool minimum;
    bool zero_point;  // a number per scale that levels are counted from: its minimum is -(zero point * scale)
    int32_t low, high, scales, minima, d, dmin, bytes;  // offsets in a block, and its size
};

static constexpr IntLayout int_layout(int32_t cols, int32_t sub, int32_t low_bits, int32_t high_bits, int32_t zero,
                                      ScaleKind scale, bool minimum, bool zero_point = false) {
    const int32_t high = 2 * cols * low_bits, scales = high + 2 * cols * high_bits;
    const bool super = cols == 256, small = scale == SCALE_E5M3 || super;
    const int32_t width = scale == SCALE_F32 ? 4 : small ? 1 : 2;  // bytes of a scale
    const int32_t scale_bytes = scale == SCALE_ONE ? 0 : width * 16 * cols / sub;
    const int32_t minima = scales + scale_bytes;
    const bool own_minima = minimum && scale != SCALE_NIBBLES;
    const int32_t d = minima + (own_minima ? width * 16 * cols / sub : 0);
    const int32_t dmin = d + (super ? 32 : scale == SCALE_E5M3 ? 64 : 0);
    const int32_t end = dmin + (super && minimum ? 32 : 0);
    return {cols, sub, low_bits, high_bits, zero, scale, minimum, zero_point, 0, high, scales, minima, d, dmin,
            (end + 63) / 64 * 64};
}

static constexpr IntLayout int_zero_point(int32_t bits) {
    return int_layout(64, 64, bits, 0, 0, SCALE_F16, true, true);
}

static constexpr IntLayout int_affine(int32_t bits) {
    return int_layout(64, 64, bits, 0, 0, SCALE_BF16, true);
}

// By format, from FORMAT_Q4_0 on. The tables of IQ4_NL, IQ4_XS, MXFP4, NF4 and NVFP4 have `zero` added.
static constexpr IntLayout INT_LAYOUTS[] = {
    int_layout(64, 32, 4, 0, 8, SCALE_F16, false),     // Q4_0
    int_layout(64, 32, 4, 0, 0, SCALE_F16, true),      // Q4_1
    int_layout(64, 32, 4, 1, 16, SCALE_F16, false),    // Q5_0
    int_layout(64, 32, 4, 1, 0, SCALE_F16, true),      // Q5_1
    int_layout(64, 32, 8, 0, 128, SCALE_F16, false),   // Q8_0
    int_layout(64, 32, 4, 0, 128, SCALE_F16, false),   // IQ4_NL
    int_layout(64, 32, 4, 0, 16, SCALE_BF16, false),   // MXFP4
    int_layout(64, 64, 4, 0, 8, SCALE_F32, false),     // INT4
    int_layout(64, 64, 8, 0, 128, SCALE_F32, false),   // INT8
    int_zero_point(4),                                 // INT4_ZP
    int_zero_point(8),                                 // INT8_ZP
    int_affine(4),                                     // AFFINE4
    int_affine(8),                                     // AFFINE8
    int_layout(64, 64, 4, 0, 8192, SCALE_F32, false),  // NF4
    int_layout(64, 16, 4, 0, 16, SCALE_E5M3, false),   // NVFP4
    int_layout(256, 16, 2, 0, 0, SCALE_NIBBLES, true),  // Q2_K
    int_layout(256, 16, 2, 1, 4, SCALE_I8, false),     // Q3_K
    int_layout(256, 32, 4, 0, 0, SCALE_U8, true),      // Q4_K
    int_layout(256, 32, 4, 1, 0, SCALE_U8, true),      // Q5_K
    int_layout(256, 16, 4, 2, 32, SCALE_I8, false),    // Q6_K
    int_layout(256, 32, 4, 0, 128, SCALE_I8, false),   // IQ4_XS
    int_layout(256, 32, 2, 0, 1, SCALE_ONE, false),    // TERNARY
};
static_assert(sizeof INT_LAYOUTS / sizeof *INT_LAYOUTS == FORMAT_COUNT - FORMAT_Q4_0, "one layout per format");

static constexpr const IntLayout& int_layout_of(int32_t format) { return INT_LAYOUTS[format - FORMAT_Q4_0]; }

// The values of the 4-bit codes, plus `zero`. FP4's are in units of one half, and its minus zero is read as zero.
static constexpr uint8_t IQ4_LEVELS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static constexpr uint8_t MXFP4_LEVELS[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
// NF4's values in units of 2^-13, so to 6e-5 of the largest: 14 bits, of which tables hold the upper and the lower 7.
static constexpr uint8_t NF4_UPPER[16] = {0, 19, 30, 38, 45, 52, 58, 64, 69, 74, 79, 85, 92, 100, 110, 128};
static constexpr uint8_t NF4_LOWER[16] = {0, 57, 51, 93, 102, 22, 22, 0, 12, 38, 96, 80, 26, 1, 34, 0};

// part: 1 for the lower bits of levels in two tables.
static constexpr const uint8_t* int_table_of(int32_t format, int part = 0) {
    return format == FORMAT_MXFP4 || format == FORMAT_NVFP4       ? MXFP4_LEVELS
           : format == FORMAT_IQ4_NL || format == FORMAT_IQ4_XS ? IQ4_LEVELS
           : format == FORMAT_NF4                               ? (part == 0 ? NF4_UPPER : NF4_LOWER)
                                                                : nullptr;
}

// Activations: int8 in [-127, 127] times `scale`, which is NaN if a value of the group was not finite. The sums that
// zero points and minima need are computed once for all matrices.
struct Group32 {
    int8_t q[32];
    float scale;
    int32_t start;       // -8 times the sum of q
    int32_t half_start;  // the same of the first 16
    float scaled_sum;    // scale times the sum of q
};

struct Group256 {
    int8_t q[256];
    int32_t start[16];  // -32 times the sum of each 16 of q
    int16_t sum16[16];  // the sums themselves
    int16_t sum32[8];   // the sums of each 32
    float scale;
    int32_t reserved[3];
};
static_assert(sizeof(Group32) == 48 && sizeof(Group256) == 384, "groups without holes");

static inline const uint16_t* halves(const uint8_t* from) { return reinterpret_cast<const uint16_t*>(from); }

static inline int64_t int_blocks(const Matrix& m) {  // of one segment
    const int64_t cols = int_layout_of(m.format).cols;
    return (m.cols / m.segments + cols - 1) / cols;
}

static inline int64_t int_panel_bytes(const Matrix& m) {
    return m.segments * int_blocks(m) * int_layout_of(m.format).bytes;
}

static inline int64_t int_activated_bytes(const Matrix& m) {
    const int64_t block = int_layout_of(m.format).cols == 64 ? 2 * sizeof(Group32) : sizeof(Group256);
    return (m.segments * int_blocks(m) * block + 63) / 64 * 64 + outliers_bytes(m);
}

}  // namespace kvasir
