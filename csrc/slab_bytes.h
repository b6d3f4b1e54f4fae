// Levels of 8 bits for many rows on AVX2. The processor multiplies unsigned by signed bytes: a level's magnitude by the
// activation, which takes the level's sign. x ^ -1 is -x - 1, so the magnitudes of the negative levels are missing once
// from each dot product: a number per row of the matrix, computed once like magnitudes and signs.
#pragma once

#include "int_groups.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// 32 columns of a panel. Words are four columns of eight rows, for each half of the panel.
struct ByteGroup {
    alignas(64) uint8_t size[8][2][32];
    uint8_t sign[8][2][32];  // 0 or 255
    int32_t missing[2][8];
};

KVASIR_INLINE void unpack_bytes(ByteGroup& to, const uint8_t* levels, int half) {
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    __m256i missing = zero;
    for (int word = 0; word < 8; ++word) {
        const __m256i number = _mm256_xor_si256(load_256(levels + 64 * word + 32 * half), _mm256_set1_epi8(-128));
        const __m256i size = _mm256_abs_epi8(number), sign = _mm256_cmpgt_epi8(zero, number);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.size[word][half]), size);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.sign[word][half]), sign);
        missing = _mm256_sub_epi32(missing, _mm256_madd_epi16(_mm256_maddubs_epi16(size, sign), ones));
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(to.missing[half]), missing);
}

// x with signs from memory: one instruction, where gcc would load the signs into a register first, of which none is left.
KVASIR_INLINE __m256i with_signs(__m256i x, const uint8_t* signs) {
    __m256i out;
    __asm__("vpxor %2, %1, %0" : "=x"(out) : "x"(x), "m"(*reinterpret_cast<const __m256i*>(signs)));
    return out;
}

// The exact dots of a group for M rows and both halves of the panel.
template <int M>
KVASIR_INLINE void byte_dots(i32x16 (&dots)[M], const ByteGroup& group, const uint8_t* x, int64_t x_stride) {
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) dots[m] = {load_256(group.missing[0]), load_256(group.missing[1])};
    KVASIR_UNROLL
    for (int c = 0; c < 8; ++c) {
        const __m256i low = in_order(load_256(group.size[c][0])), high = in_order(load_256(group.size[c][1]));
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            const __m256i xs = in_order(_mm256_set1_epi32(word(x + m * x_stride + 4 * c)));
            dots[m].low = add_products(dots[m].low, _mm256_maddubs_epi16(low, with_signs(xs, group.sign[c][0])));
            dots[m].high = add_products(dots[m].high, _mm256_maddubs_epi16(high, with_signs(xs, group.sign[c][1])));
        }
    }
}

// The same from the levels of a block: few rows do not repay storing magnitudes and signs.
template <int M>
KVASIR_INLINE void level_dots(i32x16 (&dots)[M], const uint8_t* levels, const uint8_t* x, int64_t x_stride) {
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) dots[m] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    KVASIR_UNROLL
    for (int c = 0; c < 8; ++c) {
        const u8x64 w = load(levels + 64 * c);
        const __m256i low = in_order(_mm256_xor_si256(w.low, _mm256_set1_epi8(-128)));
        const __m256i high = in_order(_mm256_xor_si256(w.high, _mm256_set1_epi8(-128)));
        const __m256i low_size = in_order(_mm256_abs_epi8(low)), high_size = in_order(_mm256_abs_epi8(high));
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            const __m256i xs = in_order(_mm256_set1_epi32(word(x + m * x_stride + 4 * c)));
            dots[m].low = add_products(dots[m].low, _mm256_maddubs_epi16(low_size, _mm256_sign_epi8(xs, low)));
            dots[m].high = add_products(dots[m].high, _mm256_maddubs_epi16(high_size, _mm256_sign_epi8(xs, high)));
        }
    }
}

template <int FORMAT_>
struct Bytes {
    static constexpr int FORMAT = FORMAT_;
    static constexpr int CODE_ROWS = 4, ROWS = 5;  // whose dots, with what they need, fit 16 registers
    static constexpr int64_t UNPACK_FROM = 24;
    using Group = ByteGroup;

    static void unpack(Group* to, const uint8_t* block) {
        constexpr IntLayout l = int_layout_of(FORMAT);
        for (int chunk = 0; chunk < 2; ++chunk) {
            for (int half = 0; half < 2; ++half) unpack_bytes(to[chunk], block + l.low + 512 * chunk, half);
        }
    }

    template <int M, bool UNPACKED>
    __attribute__((noinline)) static void multiply(float (*sums)[LANES], const Group* groups, const uint8_t* block,
                                                   int64_t blocks, const uint8_t* x, int64_t x_stride, int64_t ahead) {
        constexpr IntLayout l = int_layout_of(FORMAT);
        f32x16 acc[M];
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) acc[m] = load(sums[m]);
        for (int64_t b = 0; b < blocks; ++b, block += l.bytes) {
            if (!UNPACKED && ahead) prefetch_block<l.bytes>(block + ahead);
            for (int chunk = 0; chunk < 2; ++chunk, ++groups, x += sizeof(Group32)) {
                i32x16 dots[M];
                if constexpr (UNPACKED) byte_dots(dots, *groups, x, x_stride);
                else level_dots(dots, block + l.low + 512 * chunk, x, x_stride);
                const f32x16 scale = group_scale<FORMAT>(block, chunk);
                f32x16 minimum = scale;
                if constexpr (l.minimum) minimum = group_minimum<FORMAT>(block, chunk, scale);
                KVASIR_UNROLL
                for (int m = 0; m < M; ++m) {
                    const Group32& group = *reinterpret_cast<const Group32*>(x + m * x_stride);
                    if constexpr (zero_of(FORMAT) != 0) dots[m] = add(dots[m], group_start<FORMAT>(group));
                    acc[m] = fma(mul(scale, broadcast(group.scale)), to_float(dots[m]), acc[m]);
                    if constexpr (l.minimum) acc[m] = fma(minimum, broadcast(group.scaled_sum), acc[m]);
                }
            }
        }
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) store(sums[m], acc[m]);
    }
};

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
