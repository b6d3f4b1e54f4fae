// The vectors of simd.h on AVX2 with FMA and F16C, each in two halves. Included there alone.
#pragma once

namespace kvasir {
namespace KVASIR_ISA {

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
// The first `count` (1 to 15) floats, zeros in the other lanes; memory after them is not touched.
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
KVASIR_INLINE void store(uint8_t* to, u8x64 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), a.high);
}
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
// Keeps gcc from adding products in another order, as a tree, for which it needs more registers than there are.
KVASIR_INLINE __m256i in_order(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}
KVASIR_INLINE __m256i add_products(__m256i acc, __m256i products) {  // of neighbouring int16
    return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(products, _mm256_set1_epi16(1))));
}
// Bytes above 128 are split in halves, whose pairs of products fit 16 bits: 128 * 127 * 2 < 2^15.
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
    if (MAX_WEIGHT > 128) return {dot_wide(acc.low, w.low, xs), dot_wide(acc.high, w.high, xs)};
    return {add_products(acc.low, _mm256_maddubs_epi16(w.low, xs)),
            add_products(acc.high, _mm256_maddubs_epi16(w.high, xs))};
}
// For each row the products of bytes in 16 bits, added in two pairs: w[0] x[0] + w[1] x[1], w[2] x[2] + w[3] x[3].
struct i16x32 {
    __m256i low, high;
};
KVASIR_INLINE i16x32 pairs(u8x64 w, int32_t x) {
    const __m256i xs = _mm256_set1_epi32(x);
    return {_mm256_maddubs_epi16(w.low, xs), _mm256_maddubs_epi16(w.high, xs)};
}
KVASIR_INLINE i16x32 add(i16x32 a, i16x32 b) {
    return {in_order(_mm256_add_epi16(a.low, b.low)), in_order(_mm256_add_epi16(a.high, b.high))};
}
KVASIR_INLINE i32x16 add_pairs(i32x16 acc, i16x32 sums) {
    return {add_products(acc.low, sums.low), add_products(acc.high, sums.high)};
}
// Bytes minus 128, as magnitudes and as the numbers themselves, which give x their signs.
struct Centred {
    u8x64 size, number;
};
KVASIR_INLINE Centred centred(u8x64 w) {
    const __m256i top = _mm256_set1_epi8(-128);
    const __m256i low = _mm256_xor_si256(w.low, top), high = _mm256_xor_si256(w.high, top);
    return {{_mm256_abs_epi8(low), _mm256_abs_epi8(high)}, {low, high}};
}
// The same of centred bytes; x must not have -128. They fit 16 bits: 128 * 127 * 2 < 2^15.
KVASIR_INLINE i16x32 pairs(const Centred& w, int32_t x) {
    const __m256i xs = _mm256_set1_epi32(x);
    return {_mm256_maddubs_epi16(w.size.low, _mm256_sign_epi8(xs, w.number.low)),
            _mm256_maddubs_epi16(w.size.high, _mm256_sign_epi8(xs, w.number.high))};
}
// acc[row] + w[row][0] * x[0] + w[row][1] * x[1] of int16 pairs in words. Exact where it fits.
KVASIR_INLINE i32x16 dot_i16(i32x16 acc, i32x16 w, int32_t x) {
    const __m256i xs = _mm256_set1_epi32(x);
    return {_mm256_add_epi32(acc.low, _mm256_madd_epi16(w.low, xs)),
            _mm256_add_epi32(acc.high, _mm256_madd_epi16(w.high, xs))};
}

KVASIR_INLINE u16x32 load_pairs(const uint16_t* from) { return {load_256(from), load_256(from + 16)}; }
KVASIR_INLINE __m256i bf16_of_e4m3(__m128i from) {
    const __m256i v = _mm256_cvtepu8_epi16(from), size = _mm256_and_si256(v, _mm256_set1_epi16(0x7f));
    const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(size, 4), _mm256_set1_epi16(0x3c00));
    const __m256i table = _mm256_broadcastsi128_si256(load_128(E4M3_DENORMALS));
    // The bytes 2 m and 2 m + 1 of the table.
    const __m256i bytes = _mm256_add_epi16(
        _mm256_mullo_epi16(_mm256_and_si256(size, _mm256_set1_epi16(7)), _mm256_set1_epi16(0x202)),
        _mm256_set1_epi16(0x100));
    const __m256i is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), size);
    const __m256i number = _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(table, bytes), is_small);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x80)), 8);
    return _mm256_or_si256(sign, number);
}
// 32 E4M3 as bfloat16, exact; 480 for NaN.
KVASIR_INLINE u16x32 load_e4m3(const uint8_t* from) {
    return {bf16_of_e4m3(load_128(from)), bf16_of_e4m3(load_128(from + 16))};
}
// The even (x[0]) and the odd (x[1]) bfloat16 of each pair as float32.
KVASIR_INLINE f32x16 even_bf16(u16x32 a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(a.high, 16))};
}
KVASIR_INLINE f32x16 odd_bf16(u16x32 a) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
    return {_mm256_castsi256_ps(_mm256_and_si256(a.low, mask)), _mm256_castsi256_ps(_mm256_and_si256(a.high, mask))};
}

// The greatest lane; unspecified where a lane is NaN.
KVASIR_INLINE float greatest(f32x16 a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// The sum of all lanes.
KVASIR_INLINE int32_t total(i32x16 a) {
    const __m256i eight = _mm256_add_epi32(a.low, a.high);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
