// The vectors of simd.h on AVX-512 with VNNI and BF16. Included there alone.
#pragma once

namespace kvasir {
namespace KVASIR_ISA {

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
// The first `count` (1 to 15) floats, zeros in the other lanes; memory after them is not touched.
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
KVASIR_INLINE void store(uint8_t* to, u8x64 a) { _mm512_storeu_si512(to, a.v); }
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
#if !defined(KVASIR_EMULATE_AVX512)
// The same with x in memory: one instruction, where gcc would broadcast x to a register first.
template <int MAX_WEIGHT>
KVASIR_INLINE i32x16 dot(i32x16 acc, u8x64 w, const uint8_t* x) {
    struct __attribute__((packed, may_alias)) Word {
        int32_t value;
    };
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*reinterpret_cast<const Word*>(x)));
    return acc;
}
#endif
// acc[row] + w[row][0] * x[0] + w[row][1] * x[1] of int16 pairs in words. Exact where it fits.
KVASIR_INLINE i32x16 dot_i16(i32x16 acc, i32x16 w, int32_t x) {
    return {_mm512_dpwssd_epi32(acc.v, w.v, _mm512_set1_epi32(x))};
}

KVASIR_INLINE u16x32 load_pairs(const uint16_t* from) { return {_mm512_loadu_si512(from)}; }
// 32 E4M3 as bfloat16, exact; 480 for NaN.
KVASIR_INLINE u16x32 load_e4m3(const uint8_t* from) {
    const __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i size = _mm512_and_si512(v, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(E4M3_DENORMALS)));
    // The bytes 2 m and 2 m + 1 of the table.
    const __m512i bytes = _mm512_add_epi16(
        _mm512_mullo_epi16(_mm512_and_si512(size, _mm512_set1_epi16(7)), _mm512_set1_epi16(0x202)),
        _mm512_set1_epi16(0x100));
    const __mmask32 is_small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    const __m512i number = _mm512_mask_blend_epi16(is_small, normal, _mm512_shuffle_epi8(table, bytes));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(v, _mm512_set1_epi16(0x80)), 8);
    return {_mm512_or_si512(sign, number)};
}
// acc[row] + w[row][1] * x[1], then + w[row][0] * x[0], each with one rounding; bfloat16 pairs, x[0] in the low half.
KVASIR_INLINE f32x16 dot_bf16(f32x16 acc, u16x32 w, uint32_t x) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(x)))};
}
// The even (x[0]) and the odd (x[1]) bfloat16 of each pair as float32.
KVASIR_INLINE f32x16 even_bf16(u16x32 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
KVASIR_INLINE f32x16 odd_bf16(u16x32 a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))))};
}

// The greatest lane; unspecified where a lane is NaN.
KVASIR_INLINE float greatest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
// The sum of all lanes.
KVASIR_INLINE int32_t total(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }

}  // namespace KVASIR_ISA
}  // namespace kvasir
