// The vectors that the kernels are written in, in three bodies with the same results: AVX-512 (with VNNI and BF16),
// AVX2 with FMA, and plain C++.
//
//     f32x16   16 float32               add, sub, mul, div, fma, min, max, sqrt, comparisons that give a mask16
//     i32x16   16 int32                 add, sub, mul, shifts, bits; dot() adds products of bytes
//     u8x64    64 bytes                 unpacked weights: 16 rows x 4 columns
//     u16x32   32 half-width floats     16 rows x 2 columns, as bits in 16 words of 32
//
// It holds what the kernels use and no more. Everything lives in the namespace of the instruction set being compiled
// (KVASIR_ISA), and nothing of the standard library is instantiated here: a template shared between translation
// units would be kept once by the linker, perhaps in the body that this machine cannot run.
//
// min and max give the second operand where either is NaN. All code runs with denormals flushed (dispatch.cpp, pool).
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

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define KVASIR_AVX512 1

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};
struct u8x64 {
    __m512i v;
};
struct u16x32 {
    __m512i v;
};
struct mask16 {
    __mmask16 v;
};

KVASIR_INLINE f32x16 broadcast(float value) { return {_mm512_set1_ps(value)}; }
KVASIR_INLINE f32x16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
KVASIR_INLINE void store(float* to, f32x16 a) { _mm512_storeu_ps(to, a.v); }
KVASIR_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
KVASIR_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
KVASIR_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
KVASIR_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
KVASIR_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
KVASIR_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
KVASIR_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
KVASIR_INLINE f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
KVASIR_INLINE f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
KVASIR_INLINE f32x16 round(f32x16 a) {  // to the nearest integer, halves to even
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
KVASIR_INLINE mask16 less(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
KVASIR_INLINE mask16 less_equal(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
KVASIR_INLINE mask16 unordered(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)}; }
KVASIR_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
KVASIR_INLINE bool any(mask16 m) { return m.v != 0; }

KVASIR_INLINE __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }
// Lanes 0 to count - 1, count in 0 to 16.
KVASIR_INLINE mask16 first_lanes(int64_t count) { return {first(count)}; }
// The first `count` (1 to 15) floats, zeros in the other lanes; memory behind them is not touched.
KVASIR_INLINE f32x16 load_first(const float* from, int64_t count) {
    return {_mm512_maskz_loadu_ps(first(count), from)};
}
KVASIR_INLINE void store_first(float* to, f32x16 a, int64_t count) { _mm512_mask_storeu_ps(to, first(count), a.v); }

KVASIR_INLINE i32x16 broadcast_i32(int32_t value) { return {_mm512_set1_epi32(value)}; }
KVASIR_INLINE i32x16 load(const int32_t* from) { return {_mm512_loadu_si512(from)}; }
KVASIR_INLINE void store(int32_t* to, i32x16 a) { _mm512_storeu_si512(to, a.v); }
KVASIR_INLINE i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
KVASIR_INLINE i32x16 sub(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
KVASIR_INLINE i32x16 mul(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
KVASIR_INLINE i32x16 bit_and(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
KVASIR_INLINE i32x16 bit_or(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
KVASIR_INLINE i32x16 shift_left(i32x16 a) {
    return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
KVASIR_INLINE i32x16 shift_right(i32x16 a) {  // of unsigned words
    return {_mm512_srli_epi32(a.v, N)};
}
KVASIR_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// The nearest integers, halves to even; INT32_MIN for what does not fit and for NaN.
KVASIR_INLINE i32x16 to_int(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
KVASIR_INLINE f32x16 bits_to_float(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
KVASIR_INLINE i32x16 float_to_bits(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
// 16 bytes to words.
KVASIR_INLINE i32x16 load_u8(const uint8_t* from) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
KVASIR_INLINE i32x16 load_i8(const int8_t* from) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
// 32 bytes to pairs of int16 in words.
KVASIR_INLINE i32x16 load_u8_pairs(const uint8_t* from) {
    return {_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
// Words in [-128, 127] to 16 bytes.
KVASIR_INLINE void store_i8(int8_t* to, i32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(a.v));
}

KVASIR_INLINE f32x16 load_bf16(const uint16_t* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
KVASIR_INLINE f32x16 load_f16(const uint16_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
KVASIR_INLINE void store_f16(uint16_t* to, f32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The low halves of 16 words, as 16-bit numbers.
KVASIR_INLINE void store_low16(uint16_t* to, i32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(a.v));
}

KVASIR_INLINE u8x64 load(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
KVASIR_INLINE u8x64 broadcast_u8(uint8_t value) { return {_mm512_set1_epi8(static_cast<char>(value))}; }
KVASIR_INLINE u8x64 bit_and(u8x64 a, u8x64 b) { return {_mm512_and_si512(a.v, b.v)}; }
KVASIR_INLINE u8x64 bit_or(u8x64 a, u8x64 b) { return {_mm512_or_si512(a.v, b.v)}; }
// Shifts of 16-bit units: bits cross between the two bytes of a unit, so mask before or after.
template <int N>
KVASIR_INLINE u8x64 shift_left16(u8x64 a) {
    return {_mm512_slli_epi16(a.v, N)};
}
template <int N>
KVASIR_INLINE u8x64 shift_right16(u8x64 a) {
    return {_mm512_srli_epi16(a.v, N)};
}
// table[a & 15] for each byte.
KVASIR_INLINE u8x64 lookup(const uint8_t* table16, u8x64 a) {
    const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table16)));
    return {_mm512_shuffle_epi8(t, a.v)};
}
// acc[row] + the sum over c of w[row][c] * x[c], x: four int8 in one word. Exact. MAX_WEIGHT bounds w.
template <int MAX_WEIGHT>
KVASIR_INLINE i32x16 dot(i32x16 acc, u8x64 w, int32_t x) {
    return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(x))};
}
// acc[row] + w[row][0] * x[0] + w[row][1] * x[1] of int16 pairs in words. Exact where it fits.
KVASIR_INLINE i32x16 dot_i16(i32x16 acc, i32x16 w, int32_t x) {
    return {_mm512_dpwssd_epi32(acc.v, w.v, _mm512_set1_epi32(x))};
}

KVASIR_INLINE u16x32 load_pairs(const uint16_t* from) { return {_mm512_loadu_si512(from)}; }
// acc[row] + w[row][1] * x[1], then + w[row][0] * x[0], each with one rounding; bfloat16 pairs, x[0] in the low half.
KVASIR_INLINE f32x16 dot_bf16(f32x16 acc, u16x32 w, uint32_t x) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(x)))};
}
// The even (x[0]) and the odd (x[1]) bfloat16 of each pair as float32.
KVASIR_INLINE f32x16 even_bf16(u16x32 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
KVASIR_INLINE f32x16 odd_bf16(u16x32 a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))))};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVASIR_AVX2 1

struct f32x16 {
    __m256 low, high;
};
struct i32x16 {
    __m256i low, high;
};
struct u8x64 {
    __m256i low, high;
};
struct u16x32 {
    __m256i low, high;
};
struct mask16 {
    __m256 low, high;
};

KVASIR_INLINE f32x16 broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
KVASIR_INLINE f32x16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
KVASIR_INLINE void store(float* to, f32x16 a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}
KVASIR_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
KVASIR_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
KVASIR_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
KVASIR_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
KVASIR_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
KVASIR_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
KVASIR_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
KVASIR_INLINE f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
KVASIR_INLINE f32x16 abs(f32x16 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
KVASIR_INLINE f32x16 round(f32x16 a) {  // to the nearest integer, halves to even
    return {_mm256_round_ps(a.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
KVASIR_INLINE mask16 less(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
}
KVASIR_INLINE mask16 less_equal(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_LE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LE_OQ)};
}
KVASIR_INLINE mask16 unordered(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_UNORD_Q), _mm256_cmp_ps(a.high, b.high, _CMP_UNORD_Q)};
}
KVASIR_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    return {_mm256_blendv_ps(no.low, yes.low, m.low), _mm256_blendv_ps(no.high, yes.high, m.high)};
}
KVASIR_INLINE bool any(mask16 m) { return (_mm256_movemask_ps(m.low) | _mm256_movemask_ps(m.high)) != 0; }

KVASIR_INLINE __m256i first(int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(count)), lane);
}
// Lanes 0 to count - 1, count in 0 to 16.
KVASIR_INLINE mask16 first_lanes(int64_t count) {
    return {_mm256_castsi256_ps(first(count)), _mm256_castsi256_ps(first(count - 8))};
}
// The first `count` (1 to 15) floats, zeros in the other lanes; memory behind them is not touched.
KVASIR_INLINE f32x16 load_first(const float* from, int64_t count) {
    const __m256 low = _mm256_maskload_ps(from, first(count));
    if (count <= 8) return {low, _mm256_setzero_ps()};
    return {low, _mm256_maskload_ps(from + 8, first(count - 8))};
}
KVASIR_INLINE void store_first(float* to, f32x16 a, int64_t count) {
    _mm256_maskstore_ps(to, first(count), a.low);
    if (count > 8) _mm256_maskstore_ps(to + 8, first(count - 8), a.high);
}

KVASIR_INLINE __m256i load_256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
KVASIR_INLINE __m128i load_128(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

KVASIR_INLINE i32x16 broadcast_i32(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
KVASIR_INLINE i32x16 load(const int32_t* from) { return {load_256(from), load_256(from + 8)}; }
KVASIR_INLINE void store(int32_t* to, i32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), a.high);
}
KVASIR_INLINE i32x16 add(i32x16 a, i32x16 b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
KVASIR_INLINE i32x16 sub(i32x16 a, i32x16 b) {
    return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
KVASIR_INLINE i32x16 mul(i32x16 a, i32x16 b) {
    return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
KVASIR_INLINE i32x16 bit_and(i32x16 a, i32x16 b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
KVASIR_INLINE i32x16 bit_or(i32x16 a, i32x16 b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
template <int N>
KVASIR_INLINE i32x16 shift_left(i32x16 a) {
    return {_mm256_slli_epi32(a.low, N), _mm256_slli_epi32(a.high, N)};
}
template <int N>
KVASIR_INLINE i32x16 shift_right(i32x16 a) {  // of unsigned words
    return {_mm256_srli_epi32(a.low, N), _mm256_srli_epi32(a.high, N)};
}
KVASIR_INLINE f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
// The nearest integers, halves to even; INT32_MIN for what does not fit and for NaN.
KVASIR_INLINE i32x16 to_int(f32x16 a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
KVASIR_INLINE f32x16 bits_to_float(i32x16 a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
KVASIR_INLINE i32x16 float_to_bits(f32x16 a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
// 16 bytes to words.
KVASIR_INLINE i32x16 load_u8(const uint8_t* from) {
    const __m128i bytes = load_128(from);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
KVASIR_INLINE i32x16 load_i8(const int8_t* from) {
    const __m128i bytes = load_128(from);
    return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
// 32 bytes to pairs of int16 in words.
KVASIR_INLINE i32x16 load_u8_pairs(const uint8_t* from) {
    return {_mm256_cvtepu8_epi16(load_128(from)), _mm256_cvtepu8_epi16(load_128(from + 16))};
}
// Words in [-128, 127] to 16 bytes.
KVASIR_INLINE void store_i8(int8_t* to, i32x16 a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

KVASIR_INLINE f32x16 load_bf16(const uint16_t* from) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(from)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(from + 8)), 16))};
}
KVASIR_INLINE f32x16 load_f16(const uint16_t* from) {
    return {_mm256_cvtph_ps(load_128(from)), _mm256_cvtph_ps(load_128(from + 8))};
}
KVASIR_INLINE void store_f16(uint16_t* to, f32x16 a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a.low, mode));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm256_cvtps_ph(a.high, mode));
}
// The low halves of 16 words, as 16-bit numbers.
KVASIR_INLINE void store_low16(uint16_t* to, i32x16 a) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}

KVASIR_INLINE u8x64 load(const uint8_t* from) { return {load_256(from), load_256(from + 32)}; }
KVASIR_INLINE u8x64 broadcast_u8(uint8_t value) {
    const __m256i v = _mm256_set1_epi8(static_cast<char>(value));
    return {v, v};
}
KVASIR_INLINE u8x64 bit_and(u8x64 a, u8x64 b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
KVASIR_INLINE u8x64 bit_or(u8x64 a, u8x64 b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
// Shifts of 16-bit units: bits cross between the two bytes of a unit, so mask before or after.
template <int N>
KVASIR_INLINE u8x64 shift_left16(u8x64 a) {
    return {_mm256_slli_epi16(a.low, N), _mm256_slli_epi16(a.high, N)};
}
template <int N>
KVASIR_INLINE u8x64 shift_right16(u8x64 a) {
    return {_mm256_srli_epi16(a.low, N), _mm256_srli_epi16(a.high, N)};
}
// table[a & 15] for each byte, which must be below 128.
KVASIR_INLINE u8x64 lookup(const uint8_t* table16, u8x64 a) {
    const __m256i t = _mm256_broadcastsi128_si256(load_128(table16));
    return {_mm256_shuffle_epi8(t, a.low), _mm256_shuffle_epi8(t, a.high)};
}
KVASIR_INLINE __m256i add_products(__m256i acc, __m256i products) {  // of neighbouring int16
    return _mm256_add_epi32(acc, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
// Bytes above 128 are split in halves, whose pairs of products fit 16 bits: 127 * 127 * 2 < 2^15.
KVASIR_INLINE __m256i dot_wide(__m256i acc, __m256i w, __m256i x) {
    const __m256i low = _mm256_set1_epi8(0x7f);
    const __m256i top = _mm256_and_si256(_mm256_srli_epi16(w, 7), _mm256_set1_epi8(1));
    acc = add_products(acc, _mm256_maddubs_epi16(_mm256_and_si256(w, low), x));
    const __m256i tops = _mm256_madd_epi16(_mm256_maddubs_epi16(top, x), _mm256_set1_epi16(1));
    return _mm256_add_epi32(acc, _mm256_slli_epi32(tops, 7));
}
// acc[row] + the sum over c of w[row][c] * x[c], x: four int8 in one word. Exact. MAX_WEIGHT bounds w.
template <int MAX_WEIGHT>
KVASIR_INLINE i32x16 dot(i32x16 acc, u8x64 w, int32_t x) {
    const __m256i xs = _mm256_set1_epi32(x);
    if (MAX_WEIGHT > 127) return {dot_wide(acc.low, w.low, xs), dot_wide(acc.high, w.high, xs)};
    return {add_products(acc.low, _mm256_maddubs_epi16(w.low, xs)),
            add_products(acc.high, _mm256_maddubs_epi16(w.high, xs))};
}
// acc[row] + w[row][0] * x[0] + w[row][1] * x[1] of int16 pairs in words. Exact where it fits.
KVASIR_INLINE i32x16 dot_i16(i32x16 acc, i32x16 w, int32_t x) {
    const __m256i xs = _mm256_set1_epi32(x);
    return {_mm256_add_epi32(acc.low, _mm256_madd_epi16(w.low, xs)),
            _mm256_add_epi32(acc.high, _mm256_madd_epi16(w.high, xs))};
}

KVASIR_INLINE u16x32 load_pairs(const uint16_t* from) { return {load_256(from), load_256(from + 16)}; }
// The even (x[0]) and the odd (x[1]) bfloat16 of each pair as float32.
KVASIR_INLINE f32x16 even_bf16(u16x32 a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(a.high, 16))};
}
KVASIR_INLINE f32x16 odd_bf16(u16x32 a) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
    return {_mm256_castsi256_ps(_mm256_and_si256(a.low, mask)), _mm256_castsi256_ps(_mm256_and_si256(a.high, mask))};
}

#else

struct f32x16 {
    float v[LANES];
};
struct i32x16 {
    int32_t v[LANES];
};
struct u8x64 {
    uint8_t v[64];
};
struct u16x32 {
    uint16_t v[32];
};
struct mask16 {
    bool v[LANES];
};

#define KVASIR_EACH for (int64_t i = 0; i < LANES; ++i)

KVASIR_INLINE f32x16 broadcast(float value) {
    f32x16 a;
    KVASIR_EACH a.v[i] = value;
    return a;
}
KVASIR_INLINE f32x16 load(const float* from) {
    f32x16 a;
    KVASIR_EACH a.v[i] = from[i];
    return a;
}
KVASIR_INLINE void store(float* to, f32x16 a) { KVASIR_EACH to[i] = a.v[i]; }
KVASIR_INLINE f32x16 add(f32x16 a, f32x16 b) {
    KVASIR_EACH a.v[i] += b.v[i];
    return a;
}
KVASIR_INLINE f32x16 sub(f32x16 a, f32x16 b) {
    KVASIR_EACH a.v[i] -= b.v[i];
    return a;
}
KVASIR_INLINE f32x16 mul(f32x16 a, f32x16 b) {
    KVASIR_EACH a.v[i] *= b.v[i];
    return a;
}
KVASIR_INLINE f32x16 div(f32x16 a, f32x16 b) {
    KVASIR_EACH a.v[i] /= b.v[i];
    return a;
}
KVASIR_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    KVASIR_EACH c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
}
KVASIR_INLINE f32x16 min(f32x16 a, f32x16 b) {
    KVASIR_EACH b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return b;
}
KVASIR_INLINE f32x16 max(f32x16 a, f32x16 b) {
    KVASIR_EACH b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return b;
}
KVASIR_INLINE f32x16 sqrt(f32x16 a) {
    KVASIR_EACH a.v[i] = __builtin_sqrtf(a.v[i]);
    return a;
}
KVASIR_INLINE f32x16 abs(f32x16 a) {
    KVASIR_EACH a.v[i] = __builtin_fabsf(a.v[i]);
    return a;
}
KVASIR_INLINE f32x16 round(f32x16 a) {  // to the nearest integer, halves to even
    KVASIR_EACH a.v[i] = __builtin_rintf(a.v[i]);
    return a;
}
KVASIR_INLINE mask16 less(f32x16 a, f32x16 b) {
    mask16 m;
    KVASIR_EACH m.v[i] = a.v[i] < b.v[i];
    return m;
}
KVASIR_INLINE mask16 less_equal(f32x16 a, f32x16 b) {
    mask16 m;
    KVASIR_EACH m.v[i] = a.v[i] <= b.v[i];
    return m;
}
KVASIR_INLINE mask16 unordered(f32x16 a, f32x16 b) {
    mask16 m;
    KVASIR_EACH m.v[i] = a.v[i] != a.v[i] || b.v[i] != b.v[i];
    return m;
}
KVASIR_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    KVASIR_EACH no.v[i] = m.v[i] ? yes.v[i] : no.v[i];
    return no;
}
KVASIR_INLINE bool any(mask16 m) {
    bool found = false;
    KVASIR_EACH found = found || m.v[i];
    return found;
}
// Lanes 0 to count - 1, count in 0 to 16.
KVASIR_INLINE mask16 first_lanes(int64_t count) {
    mask16 m;
    KVASIR_EACH m.v[i] = i < count;
    return m;
}
// The first `count` (1 to 15) floats, zeros in the other lanes; memory behind them is not touched.
KVASIR_INLINE f32x16 load_first(const float* from, int64_t count) {
    f32x16 a = broadcast(0.0f);
    for (int64_t i = 0; i < count; ++i) a.v[i] = from[i];
    return a;
}
KVASIR_INLINE void store_first(float* to, f32x16 a, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = a.v[i];
}

KVASIR_INLINE i32x16 broadcast_i32(int32_t value) {
    i32x16 a;
    KVASIR_EACH a.v[i] = value;
    return a;
}
KVASIR_INLINE i32x16 load(const int32_t* from) {
    i32x16 a;
    std::memcpy(a.v, from, sizeof a.v);
    return a;
}
KVASIR_INLINE void store(int32_t* to, i32x16 a) { std::memcpy(to, a.v, sizeof a.v); }
KVASIR_INLINE i32x16 add(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]));
    return a;
}
KVASIR_INLINE i32x16 sub(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i]));
    return a;
}
KVASIR_INLINE i32x16 mul(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) * static_cast<uint32_t>(b.v[i]));
    return a;
}
KVASIR_INLINE i32x16 bit_and(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] &= b.v[i];
    return a;
}
KVASIR_INLINE i32x16 bit_or(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] |= b.v[i];
    return a;
}
template <int N>
KVASIR_INLINE i32x16 shift_left(i32x16 a) {
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N);
    return a;
}
template <int N>
KVASIR_INLINE i32x16 shift_right(i32x16 a) {  // of unsigned words
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> N);
    return a;
}
KVASIR_INLINE f32x16 to_float(i32x16 a) {
    f32x16 b;
    KVASIR_EACH b.v[i] = static_cast<float>(a.v[i]);
    return b;
}
// The nearest integers, halves to even; INT32_MIN for what does not fit and for NaN.
KVASIR_INLINE i32x16 to_int(f32x16 a) {
    i32x16 b;
    KVASIR_EACH {
        const float r = __builtin_rintf(a.v[i]);
        b.v[i] = r >= -2147483648.0f && r < 2147483648.0f ? static_cast<int32_t>(r) : INT32_MIN;
    }
    return b;
}
KVASIR_INLINE f32x16 bits_to_float(i32x16 a) {
    f32x16 b;
    std::memcpy(b.v, a.v, sizeof b.v);
    return b;
}
KVASIR_INLINE i32x16 float_to_bits(f32x16 a) {
    i32x16 b;
    std::memcpy(b.v, a.v, sizeof b.v);
    return b;
}
// 16 bytes to words.
KVASIR_INLINE i32x16 load_u8(const uint8_t* from) {
    i32x16 a;
    KVASIR_EACH a.v[i] = from[i];
    return a;
}
KVASIR_INLINE i32x16 load_i8(const int8_t* from) {
    i32x16 a;
    KVASIR_EACH a.v[i] = from[i];
    return a;
}
// 32 bytes to pairs of int16 in words.
KVASIR_INLINE i32x16 load_u8_pairs(const uint8_t* from) {
    i32x16 a;
    KVASIR_EACH a.v[i] = from[2 * i] | from[2 * i + 1] << 16;
    return a;
}
// Words in [-128, 127] to 16 bytes.
KVASIR_INLINE void store_i8(int8_t* to, i32x16 a) { KVASIR_EACH to[i] = static_cast<int8_t>(a.v[i]); }

KVASIR_INLINE float f32_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
KVASIR_INLINE uint32_t bits_of_f32(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
// Half precision by integers and one exact product, so that flushed denormals do not matter.
KVASIR_INLINE float f16_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return f32_of_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x400u) return f32_of_bits(sign | ((magnitude << 13) + 0x38000000u));
    return f32_of_bits(sign | bits_of_f32(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
}
KVASIR_INLINE uint16_t float_to_f16(float value) {  // to the nearest, halves to even
    const uint32_t bits = bits_of_f32(value);
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude >= 0x38800000u) {
        const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
        return static_cast<uint16_t>(sign | (rounded >> 13));
    }
    const float scaled = f32_of_bits(magnitude) * 16777216.0f;  // in units of the least denormal
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_rintf(scaled)));
}
KVASIR_INLINE f32x16 load_bf16(const uint16_t* from) {
    f32x16 a;
    KVASIR_EACH a.v[i] = f32_of_bits(static_cast<uint32_t>(from[i]) << 16);
    return a;
}
KVASIR_INLINE f32x16 load_f16(const uint16_t* from) {
    f32x16 a;
    KVASIR_EACH a.v[i] = f16_to_float(from[i]);
    return a;
}
KVASIR_INLINE void store_f16(uint16_t* to, f32x16 a) { KVASIR_EACH to[i] = float_to_f16(a.v[i]); }
// The low halves of 16 words, as 16-bit numbers.
KVASIR_INLINE void store_low16(uint16_t* to, i32x16 a) { KVASIR_EACH to[i] = static_cast<uint16_t>(a.v[i]); }

KVASIR_INLINE u8x64 load(const uint8_t* from) {
    u8x64 a;
    std::memcpy(a.v, from, sizeof a.v);
    return a;
}
KVASIR_INLINE u8x64 broadcast_u8(uint8_t value) {
    u8x64 a;
    std::memset(a.v, value, sizeof a.v);
    return a;
}
KVASIR_INLINE u8x64 bit_and(u8x64 a, u8x64 b) {
    for (int i = 0; i < 64; ++i) a.v[i] &= b.v[i];
    return a;
}
KVASIR_INLINE u8x64 bit_or(u8x64 a, u8x64 b) {
    for (int i = 0; i < 64; ++i) a.v[i] |= b.v[i];
    return a;
}
// Shifts of 16-bit units: bits cross between the two bytes of a unit, so mask before or after.
template <int N>
KVASIR_INLINE u8x64 shift_left16(u8x64 a) {
    for (int i = 0; i < 64; i += 2) {
        const unsigned unit = (a.v[i] | a.v[i + 1] << 8) << N;
        a.v[i] = static_cast<uint8_t>(unit);
        a.v[i + 1] = static_cast<uint8_t>(unit >> 8);
    }
    return a;
}
template <int N>
KVASIR_INLINE u8x64 shift_right16(u8x64 a) {
    for (int i = 0; i < 64; i += 2) {
        const unsigned unit = static_cast<unsigned>(a.v[i] | a.v[i + 1] << 8) >> N;
        a.v[i] = static_cast<uint8_t>(unit);
        a.v[i + 1] = static_cast<uint8_t>(unit >> 8);
    }
    return a;
}
// table[a & 15] for each byte, which must be below 128.
KVASIR_INLINE u8x64 lookup(const uint8_t* table16, u8x64 a) {
    for (int i = 0; i < 64; ++i) a.v[i] = table16[a.v[i] & 15];
    return a;
}
// acc[row] + the sum over c of w[row][c] * x[c], x: four int8 in one word. Exact. MAX_WEIGHT bounds w.
template <int MAX_WEIGHT>
KVASIR_INLINE i32x16 dot(i32x16 acc, u8x64 w, int32_t x) {
    int8_t xs[4];
    std::memcpy(xs, &x, sizeof xs);
    KVASIR_EACH {
        for (int c = 0; c < 4; ++c) acc.v[i] += w.v[4 * i + c] * xs[c];
    }
    return acc;
}
// acc[row] + w[row][0] * x[0] + w[row][1] * x[1] of int16 pairs in words. Exact where it fits.
KVASIR_INLINE i32x16 dot_i16(i32x16 acc, i32x16 w, int32_t x) {
    int16_t xs[2], ws[2];
    std::memcpy(xs, &x, sizeof xs);
    KVASIR_EACH {
        std::memcpy(ws, &w.v[i], sizeof ws);
        acc.v[i] += ws[0] * xs[0] + ws[1] * xs[1];
    }
    return acc;
}

KVASIR_INLINE u16x32 load_pairs(const uint16_t* from) {
    u16x32 a;
    std::memcpy(a.v, from, sizeof a.v);
    return a;
}
// The even (x[0]) and the odd (x[1]) bfloat16 of each pair as float32.
KVASIR_INLINE f32x16 even_bf16(u16x32 a) {
    f32x16 b;
    KVASIR_EACH b.v[i] = f32_of_bits(static_cast<uint32_t>(a.v[2 * i]) << 16);
    return b;
}
KVASIR_INLINE f32x16 odd_bf16(u16x32 a) {
    f32x16 b;
    KVASIR_EACH b.v[i] = f32_of_bits(static_cast<uint32_t>(a.v[2 * i + 1]) << 16);
    return b;
}

#endif

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

// Words that hold float32 to bfloat16 in their low halves, to the nearest, halves to even; NaN stays NaN.
KVASIR_INLINE i32x16 round_to_bf16(f32x16 a) {
    const i32x16 bits = float_to_bits(a);
    const i32x16 odd = bit_and(shift_right<16>(bits), broadcast_i32(1));
    const i32x16 rounded = shift_right<16>(add(bits, add(odd, broadcast_i32(0x7fff))));
    const i32x16 quiet = bit_or(shift_right<16>(bits), broadcast_i32(0x40));
    return float_to_bits(select(unordered(a, a), bits_to_float(quiet), bits_to_float(rounded)));
}
KVASIR_INLINE void store_bf16(uint16_t* to, f32x16 a) { store_low16(to, round_to_bf16(a)); }
// The same for lanes that are not denormal, by one instruction where there is one.
KVASIR_INLINE void store_bf16_normal(uint16_t* to, f32x16 a) {
#if defined(KVASIR_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(a.v));
#else
    store_bf16(to, a);
#endif
}

// The sum of the lanes by the one tree there is: l with l+8, then with l+4, l+2, l+1. It is short enough to be
// written once for all three bodies.
KVASIR_INLINE float sum(f32x16 a) {
    float lane[LANES];
    store(lane, a);
    for (int64_t half = LANES / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
}
// The greatest lane; unspecified where a lane is NaN.
#if defined(KVASIR_AVX512)
KVASIR_INLINE float greatest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
#elif defined(KVASIR_AVX2)
KVASIR_INLINE float greatest(f32x16 a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
KVASIR_INLINE float greatest(f32x16 a) {
    float most = a.v[0];
    for (int64_t i = 1; i < LANES; ++i) most = most > a.v[i] ? most : a.v[i];
    return most;
}
#endif

// e^a to about one unit in the last place: 2^n * e^r with |r| <= ln(2) / 2 and a polynomial for e^r - 1 - r
// (minimax, as in Cephes). 0 below -87.3 (results would be denormal), infinity above 88.7, NaN for NaN.
KVASIR_INLINE f32x16 exp(f32x16 a) {
    const f32x16 x = min(max(a, broadcast(-104.0f)), broadcast(89.0f));
    const f32x16 n = round(mul(x, broadcast(1.44269504088896341f)));
    const f32x16 r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
    f32x16 p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), broadcast(1.0f));
    // Two factors, since 2^n alone may not fit where the product does.
    const i32x16 k = to_int(n);
    const i32x16 half = shift_right<1>(add(k, broadcast_i32(256)));  // (k + 256) / 2, which is positive
    const i32x16 rest = sub(k, sub(half, broadcast_i32(128)));
    const f32x16 first_factor = bits_to_float(shift_left<23>(add(half, broadcast_i32(127 - 128))));
    const f32x16 second_factor = bits_to_float(shift_left<23>(add(rest, broadcast_i32(127))));
    const f32x16 result = mul(mul(p, first_factor), second_factor);
    const f32x16 clamped = select(less(a, broadcast(-87.3365402f)), broadcast(0.0f), result);
    return select(unordered(a, a), a, clamped);
}

// a with the sign of b; a must not be negative.
KVASIR_INLINE f32x16 with_sign(f32x16 a, f32x16 b) {
    const i32x16 sign = bit_and(float_to_bits(b), broadcast_i32(INT32_MIN));
    return bits_to_float(bit_or(float_to_bits(a), sign));
}

// tanh to 1.4 units in the last place, odd to the bit. Near 0 a minimax polynomial for (tanh x - x) / x^3,
// farther out 1 - 2 / (e^2x + 1). NaN for NaN.
KVASIR_INLINE f32x16 tanh(f32x16 a) {
    const f32x16 x = abs(a), square = mul(x, x);
    f32x16 p = broadcast(-5.717044696e-3f);
    p = fma(p, square, broadcast(2.065058611e-2f));
    p = fma(p, square, broadcast(-5.374349654e-2f));
    p = fma(p, square, broadcast(1.333149076e-1f));
    p = fma(p, square, broadcast(-3.333328366e-1f));
    const f32x16 near = fma(mul(p, square), x, x);
    const f32x16 far = sub(broadcast(1.0f), div(broadcast(2.0f), add(exp(add(x, x)), broadcast(1.0f))));
    return select(unordered(a, a), a, with_sign(select(less(x, broadcast(0.625f)), near, far), a));
}

// erf to 1.2 units in the last place, odd to the bit. Below 1 a minimax polynomial for erf(x) / x - 1, above it
// one for -log(1 - erf(x)). NaN for NaN.
KVASIR_INLINE f32x16 erf(f32x16 a) {
    const f32x16 x = abs(a), square = mul(x, x);
    f32x16 p = broadcast(7.889122935e-5f);
    p = fma(p, square, broadcast(-8.020842215e-4f));
    p = fma(p, square, broadcast(5.189535674e-3f));
    p = fma(p, square, broadcast(-2.685444430e-2f));
    p = fma(p, square, broadcast(1.128360033e-1f));
    p = fma(p, square, broadcast(-3.761262596e-1f));
    p = fma(p, square, broadcast(1.283791661e-1f));
    const f32x16 near = fma(p, x, x);
    const f32x16 t = min(x, broadcast(4.0f));  // where erf is 1 already
    f32x16 q = broadcast(-1.855740702e-4f);
    q = fma(q, t, broadcast(2.939607948e-3f));
    q = fma(q, t, broadcast(-2.180531994e-2f));
    q = fma(q, t, broadcast(1.030373722e-1f));
    q = fma(q, t, broadcast(6.382256746e-1f));
    q = fma(q, t, broadcast(1.127040029f));
    q = fma(q, t, broadcast(3.537187586e-4f));
    const f32x16 far = sub(broadcast(1.0f), exp(sub(broadcast(0.0f), q)));
    return select(unordered(a, a), a, with_sign(select(less(x, broadcast(1.0f)), near, far), a));
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
