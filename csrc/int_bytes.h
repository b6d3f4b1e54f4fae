// Levels of 8 bits for many rows on AVX2. The processor multiplies unsigned by signed bytes: a level's magnitude by the
// activation, which takes the level's sign. x ^ -1 is -x - 1, so the magnitudes of the negative levels are missing once
// from each dot product: a number per row of the matrix, computed once like magnitudes and signs.
#pragma once

#include "int_groups.h"

#if defined(KVASIR_AVX2)

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// 32 columns of a panel. Words are four columns of eight rows, for each half of the panel.
struct ByteGroup {
    uint8_t size[2][8][32];
    uint8_t sign[2][8][32];  // 0 or 255
    int32_t missing[2][8];
};

constexpr int64_t BYTE_ROWS_FROM = 24;  // from how many rows on, so that all tiles have 6 to 8

// Whether the levels of a format are unpacked in this form.
constexpr bool has_bytes(int format) { return int_layout_of(format).low_bits == 8; }

KVASIR_INLINE void unpack_bytes(ByteGroup& to, const uint8_t* levels, int half) {
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    __m256i missing = zero;
    for (int word = 0; word < 8; ++word) {
        const __m256i number = _mm256_xor_si256(load_256(levels + 64 * word + 32 * half), _mm256_set1_epi8(-128));
        const __m256i size = _mm256_abs_epi8(number), sign = _mm256_cmpgt_epi8(zero, number);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.size[half][word]), size);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.sign[half][word]), sign);
        missing = _mm256_sub_epi32(missing, _mm256_madd_epi16(_mm256_maddubs_epi16(size, sign), ones));
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(to.missing[half]), missing);
}

// `blocks` blocks of a panel to two groups each.
template <int FORMAT>
__attribute__((noinline)) void unpack_byte_panel(uint8_t* to, const uint8_t* from, int64_t blocks) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    ByteGroup* groups = reinterpret_cast<ByteGroup*>(to);
    for (int64_t b = 0; b < blocks; ++b, from += l.bytes) {
        for (int chunk = 0; chunk < 2; ++chunk, ++groups) {
            for (int half = 0; half < 2; ++half) unpack_bytes(*groups, from + l.low + 512 * chunk, half);
        }
    }
}

// The exact dots of a group for M rows and one half of the panel.
template <int M>
KVASIR_INLINE void byte_dots(__m256i (&dots)[M], const ByteGroup& group, int half, const uint8_t* x, int64_t x_stride) {
    const __m256i ones = _mm256_set1_epi16(1);
    KVASIR_UNROLL
    for (int c = 0; c < 8; ++c) {
        const __m256i size = load_256(group.size[half][c]), sign = load_256(group.sign[half][c]);
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            const __m256i signed_x = _mm256_xor_si256(_mm256_set1_epi32(word(x + m * x_stride + 4 * c)), sign);
            const __m256i products = _mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), ones);
            dots[m] = in_order(_mm256_add_epi32(products, c == 0 ? load_256(group.missing[half]) : dots[m]));
        }
    }
}

KVASIR_INLINE __m256 half_of(f32x16 a, int half) { return half == 0 ? a.low : a.high; }

// The groups of `blocks` blocks for M rows and one half of the panel, from 0.
template <int FORMAT, int M>
KVASIR_INLINE void add_byte_half(__m256 (&acc)[M], int half, const uint8_t* block, const ByteGroup* groups,
                                 int64_t blocks, const uint8_t* x, int64_t x_stride, int64_t ahead) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) acc[m] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b, block += l.bytes) {
        const uint8_t* const whole[1] = {block};
        if (ahead != 0) prefetch_part<l.bytes>(whole, ahead, 0);
        for (int chunk = 0; chunk < 2; ++chunk, ++groups, x += sizeof(Group32)) {
            __m256i dots[M];
            byte_dots(dots, *groups, half, x, x_stride);
            if constexpr (zero_of(FORMAT) != 0) {
                KVASIR_UNROLL
                for (int m = 0; m < M; ++m) {
                    const i32x16 start = group_start<FORMAT>(*reinterpret_cast<const Group32*>(x + m * x_stride));
                    dots[m] = _mm256_add_epi32(dots[m], start.low);
                }
            }
            const f32x16 scales = group_scale<FORMAT>(block, chunk);
            const __m256 scale = half_of(scales, half);
            __m256 minimum = scale;
            if constexpr (l.minimum) minimum = half_of(group_minimum<FORMAT>(block, chunk, scales), half);
            KVASIR_UNROLL
            for (int m = 0; m < M; ++m) {
                const Group32& group = *reinterpret_cast<const Group32*>(x + m * x_stride);
                acc[m] = _mm256_fmadd_ps(_mm256_mul_ps(scale, _mm256_set1_ps(group.scale)), _mm256_cvtepi32_ps(dots[m]),
                                         acc[m]);
                if constexpr (l.minimum) {
                    acc[m] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(group.scaled_sum), acc[m]);
                }
            }
        }
    }
}

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir

#endif
