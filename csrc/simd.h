// The vectors that the kernels use, in three implementations with the same results: AVX-512 with VNNI and BF16
// (simd_avx512.h), AVX2 with FMA (simd_avx2.h), and plain C++ (simd_portable.h). What they share is here.
//
//     f32x16   16 float32               add, sub, mul, div, fma, min, max, sqrt, comparisons that give a mask16
//     i32x16   16 int32                 add, sub, mul, shifts, bits; dot() adds products of bytes
//     u8x64    64 bytes                 unpacked weights: 16 rows x 4 columns
//     u16x32   32 half-width floats     16 rows x 2 columns, as bits in 16 words of 32
//
// It has only what the kernels use. Everything lives in the namespace of the instruction set being compiled
// (KVASIR_ISA), and nothing of the standard library is instantiated here: a template shared between translation units
// would be kept once by the linker, perhaps in a version that this machine cannot run.
//
// min and max give the second operand if either is NaN. All code runs with denormals flushed (dispatch.cpp, pool).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__FAST_MATH__)
#error "the kernels fix the order and rounding of every operation: build without -ffast-math and -Ofast"
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define KVASIR_INLINE inline __attribute__((always_inline))

namespace kvasir {
namespace KVASIR_ISA {

constexpr int64_t LANES = 16;
// The bfloat16 bits of m 2^-9, the numbers of E4M3 without an exponent.
static constexpr uint16_t E4M3_DENORMALS[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

}  // namespace KVASIR_ISA
}  // namespace kvasir

#if defined(KVASIR_EMULATE_AVX512) || (defined(__AVX512DQ__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__))
#define KVASIR_AVX512 1
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVASIR_AVX2 1
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace kvasir {
namespace KVASIR_ISA {

#if !defined(KVASIR_AVX512)
// acc[row] + w[row][1] * x[1], then + w[row][0] * x[0], each with one rounding; bfloat16 pairs, x[0] in the low half.
KVASIR_INLINE f32x16 dot_bf16(f32x16 acc, u16x32 w, uint32_t x) {
    float low, high;
    const uint32_t low_bits = x << 16, high_bits = x & 0xffff0000u;
    std::memcpy(&low, &low_bits, sizeof low);
    std::memcpy(&high, &high_bits, sizeof high);
    return fma(even_bf16(w), broadcast(low), fma(odd_bf16(w), broadcast(high), acc));
}
#endif

#if !defined(KVASIR_AVX512) || defined(KVASIR_EMULATE_AVX512)
// dot() with x in memory.
template <int MAX_WEIGHT>
KVASIR_INLINE i32x16 dot(i32x16 acc, u8x64 w, const uint8_t* x) {
    int32_t value;
    std::memcpy(&value, x, sizeof value);
    return dot<MAX_WEIGHT>(acc, w, value);
}
#endif

// Words that hold float32 to bfloat16 in their low halves, to the nearest, halves to even; NaN stays NaN.
KVASIR_INLINE i32x16 round_to_bf16(f32x16 a) {
    const i32x16 bits = float_to_bits(a);
    const i32x16 odd = bit_and(shift_right<16>(bits), broadcast_i32(1));
    const i32x16 rounded = shift_right<16>(add(bits, add(odd, broadcast_i32(0x7fff))));
    const i32x16 quiet = bit_or(shift_right<16>(bits), broadcast_i32(0x40));
    return float_to_bits(select(unordered(a, a), bits_to_float(quiet), bits_to_float(rounded)));
}
KVASIR_INLINE void store_bf16(uint16_t* to, f32x16 a) { store_low16(to, round_to_bf16(a)); }
// The same for lanes that are not denormal, by one instruction if available.
KVASIR_INLINE void store_bf16_normal(uint16_t* to, f32x16 a) {
#if defined(KVASIR_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(a.v));
#else
    store_bf16(to, a);
#endif
}

// The sum of the lanes by a fixed tree: l with l+8, then with l+4, l+2, l+1. It is short enough to be written once for
// all three implementations.
KVASIR_INLINE float sum(f32x16 a) {
    float lane[LANES];
    store(lane, a);
    for (int64_t half = LANES / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
