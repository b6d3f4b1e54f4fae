// The memory layout of integer formats: the blocks of packed weights, and the groups of quantized activations.
//
// A block holds 16 rows (a panel) by 64 or 256 columns. Each number of a row, of `bits` bits, becomes an unsigned
// level, whose lower and upper bits are in separate planes. A vector of a plane of b bits is 64 bytes, four columns of
// each row: byte 4 r + c is row r, and its field j (b bits, lowest first) is column 4 j + c. So one shift and one mask
// give the operand of the byte dot products, and no sum crosses rows.
//
//     64 columns (two groups of 32)      planes | scales [2][16] | minima [2][16]        two bytes each
//     256 columns (a super-block)        planes | scales [256 / sub][16] | minima [4][16][2] | d [16] | dmin [16]
//
// Scales and minima of super-blocks are bytes, d and dmin float16. Q2_K keeps a scale and a minimum in the nibbles of
// one byte, in pairs as minima are: [8][16][2]. Blocks are padded to whole cache lines. An odd last group of 32 gets
// an empty neighbour (scale 0).
#pragma once

#include "matrix.h"

namespace kvasir {

enum ScaleKind : int32_t {
    SCALE_F16,      // per 32 columns
    SCALE_BF16,     // per 32 columns: powers of two beyond the range of float16
    SCALE_U8,       // bytes, times a float16 d per super-block
    SCALE_I8,       // the same, signed
    SCALE_NIBBLES,  // scale and minimum in one byte
    SCALE_ONE,      // d alone
};

struct IntLayout {
    int32_t cols;                 // of a block: 64 or 256
    int32_t sub;                  // columns per scale: 16 or 32
    int32_t low_bits, high_bits;  // of the two planes
    int32_t zero;                 // the level that means 0
    ScaleKind scale;
    bool minimum;
    int32_t low, high, scales, minima, d, dmin, bytes;  // offsets in a block, and its size
};

static constexpr IntLayout int_layout(int32_t cols, int32_t sub, int32_t low_bits, int32_t high_bits, int32_t zero,
                                      ScaleKind scale, bool minimum) {
    const int32_t high = 2 * cols * low_bits, scales = high + 2 * cols * high_bits;
    const bool super = cols == 256;
    const int32_t scale_bytes = super ? (scale == SCALE_ONE ? 0 : 16 * cols / sub) : 64;
    const int32_t minima = scales + scale_bytes;
    const bool own_minima = minimum && scale != SCALE_NIBBLES;
    const int32_t d = minima + (own_minima ? (super ? 16 * cols / sub : 64) : 0);
    const int32_t dmin = d + (super ? 32 : 0);
    const int32_t end = dmin + (super && minimum ? 32 : 0);
    return {cols, sub, low_bits, high_bits, zero, scale, minimum, 0, high, scales, minima, d, dmin,
            (end + 63) / 64 * 64};
}

// By format, from FORMAT_Q4_0 on. The tables of IQ4_NL, IQ4_XS and MXFP4 have `zero` added.
static constexpr IntLayout INT_LAYOUTS[] = {
    int_layout(64, 32, 4, 0, 8, SCALE_F16, false),     // Q4_0
    int_layout(64, 32, 4, 0, 0, SCALE_F16, true),      // Q4_1
    int_layout(64, 32, 4, 1, 16, SCALE_F16, false),    // Q5_0
    int_layout(64, 32, 4, 1, 0, SCALE_F16, true),      // Q5_1
    int_layout(64, 32, 8, 0, 128, SCALE_F16, false),   // Q8_0
    int_layout(64, 32, 4, 0, 128, SCALE_F16, false),   // IQ4_NL
    int_layout(64, 32, 4, 0, 16, SCALE_BF16, false),   // MXFP4
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

// The values of the 4-bit codes, plus `zero`. MXFP4's are in units of one half, and its minus zero is read as zero.
static constexpr uint8_t IQ4_LEVELS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static constexpr uint8_t MXFP4_LEVELS[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

static constexpr const uint8_t* int_table_of(int32_t format) {
    return format == FORMAT_MXFP4                                   ? MXFP4_LEVELS
           : format == FORMAT_IQ4_NL || format == FORMAT_IQ4_XS ? IQ4_LEVELS
                                                                    : nullptr;
}

// Activations: int8 in [-127, 127] times `scale`, which is NaN if a value of the group was not finite. The sums that
// zero points and minima need are computed once for all matrices.
struct Group32 {
    int8_t q[32];
    float scale;
    int32_t start;     // -8 times the sum of q
    float scaled_sum;  // scale times the sum of q
};

struct Group256 {
    int8_t q[256];
    int32_t start[16];  // -32 times the sum of each 16 of q
    int16_t sum16[16];  // the sums themselves
    int16_t sum32[8];   // the sums of each 32
    float scale;
    int32_t reserved[3];
};
static_assert(sizeof(Group32) == 44 && sizeof(Group256) == 384, "groups without holes");

static inline const uint16_t* halves(const uint8_t* from) { return reinterpret_cast<const uint16_t*>(from); }

static inline int64_t int_blocks(const Matrix& m) {  // of one segment
    const int64_t cols = int_layout_of(m.format).cols;
    return (m.cols / m.segments + cols - 1) / cols;
}

static inline int64_t int_panel_bytes(const Matrix& m) {
    return m.segments * int_blocks(m) * int_layout_of(m.format).bytes;
}

static inline int64_t int_activated_bytes(const Matrix& m) {
    const int64_t block = group_of(m.format) == 32 ? 2 * sizeof(Group32) : sizeof(Group256);
    return (m.segments * int_blocks(m) * block + 63) / 64 * 64;
}

}  // namespace kvasir
