// Vectors of 8 numbers of 64 bits, in the same three implementations as simd.h, and the bits of a mask.
//
//     f64x8    8 float64                add, sub, mul, min, max
//     i64x8    8 int64                  add, sub, shifts, bits; multiply_words() takes the low halves
// There is no fma: code that uses these rounds after each operation. min and max give the second operand if either
// is NaN.
#pragma once

#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {

#if defined(KVASIR_AVX512)

struct f64x8 {
    __m512d v;
};
struct i64x8 {
    __m512i v;
};

KVASIR_INLINE f64x8 broadcast_f64(double value) { return {_mm512_set1_pd(value)}; }
KVASIR_INLINE f64x8 low_to_double(f32x16 a) { return {_mm512_cvtps_pd(_mm512_castps512_ps256(a.v))}; }
KVASIR_INLINE f64x8 high_to_double(f32x16 a) { return {_mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1))}; }
KVASIR_INLINE f64x8 add(f64x8 a, f64x8 b) { return {_mm512_add_pd(a.v, b.v)}; }
KVASIR_INLINE f64x8 sub(f64x8 a, f64x8 b) { return {_mm512_sub_pd(a.v, b.v)}; }
KVASIR_INLINE f64x8 mul(f64x8 a, f64x8 b) { return {_mm512_mul_pd(a.v, b.v)}; }
KVASIR_INLINE f64x8 min(f64x8 a, f64x8 b) { return {_mm512_min_pd(a.v, b.v)}; }
KVASIR_INLINE f64x8 max(f64x8 a, f64x8 b) { return {_mm512_max_pd(a.v, b.v)}; }
KVASIR_INLINE i64x8 float_to_bits(f64x8 a) { return {_mm512_castpd_si512(a.v)}; }
KVASIR_INLINE f64x8 bits_to_float(i64x8 a) { return {_mm512_castsi512_pd(a.v)}; }

KVASIR_INLINE i64x8 broadcast_i64(int64_t value) { return {_mm512_set1_epi64(value)}; }
KVASIR_INLINE i64x8 load(const int64_t* from) { return {_mm512_loadu_si512(from)}; }
KVASIR_INLINE void store(int64_t* to, i64x8 a) { _mm512_storeu_si512(to, a.v); }
KVASIR_INLINE i64x8 add(i64x8 a, i64x8 b) { return {_mm512_add_epi64(a.v, b.v)}; }
KVASIR_INLINE i64x8 sub(i64x8 a, i64x8 b) { return {_mm512_sub_epi64(a.v, b.v)}; }
KVASIR_INLINE i64x8 bit_and(i64x8 a, i64x8 b) { return {_mm512_and_si512(a.v, b.v)}; }
KVASIR_INLINE i64x8 bit_or(i64x8 a, i64x8 b) { return {_mm512_or_si512(a.v, b.v)}; }
KVASIR_INLINE i64x8 bit_xor(i64x8 a, i64x8 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
KVASIR_INLINE i64x8 shift_left(i64x8 a) {
    return {_mm512_slli_epi64(a.v, N)};
}
template <int N>
KVASIR_INLINE i64x8 shift_right(i64x8 a) {  // of unsigned numbers
    return {_mm512_srli_epi64(a.v, N)};
}
// The products of the low halves, unsigned.
KVASIR_INLINE i64x8 multiply_words(i64x8 a, i64x8 b) { return {_mm512_mul_epu32(a.v, b.v)}; }
// a[0] b[0] a[1] b[1] ... a[7] b[7]
KVASIR_INLINE void store_pairs(int64_t* to, i64x8 a, i64x8 b) {
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64(a.v, low, b.v));
    _mm512_storeu_si512(to + 8, _mm512_permutex2var_epi64(a.v, high, b.v));
}

// Bit i where a[i] >= b[i].
KVASIR_INLINE uint32_t at_least(f64x8 a, f64x8 b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_GE_OQ); }
KVASIR_INLINE f32x16 to_single(f64x8 low, f64x8 high) {
    return {_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low.v)), _mm512_cvtpd_ps(high.v), 1)};
}
// The lanes whose bits are set, one after another. Memory for all lanes may be written.
KVASIR_INLINE void pack(int32_t* to, i32x16 a, uint32_t bits) {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), a.v));
}
KVASIR_INLINE void pack(double* to, f64x8 a, uint32_t bits) {
    _mm512_storeu_pd(to, _mm512_maskz_compress_pd(static_cast<__mmask8>(bits), a.v));
}
// table[a[i] & 31]
KVASIR_INLINE f32x16 pick32(const float* table, i32x16 a) {
    return {_mm512_permutex2var_ps(_mm512_loadu_ps(table), a.v, _mm512_loadu_ps(table + 16))};
}

// Lane i as bit i, and back.
KVASIR_INLINE uint32_t lanes(mask16 m) { return m.v; }
KVASIR_INLINE mask16 mask_of(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }

#elif defined(KVASIR_AVX2)

struct f64x8 {
    __m256d low, high;
};
struct i64x8 {
    __m256i low, high;
};

KVASIR_INLINE f64x8 broadcast_f64(double value) { return {_mm256_set1_pd(value), _mm256_set1_pd(value)}; }
KVASIR_INLINE f64x8 to_double(__m256 a) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))};
}
KVASIR_INLINE f64x8 low_to_double(f32x16 a) { return to_double(a.low); }
KVASIR_INLINE f64x8 high_to_double(f32x16 a) { return to_double(a.high); }
KVASIR_INLINE f64x8 add(f64x8 a, f64x8 b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
KVASIR_INLINE f64x8 sub(f64x8 a, f64x8 b) { return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)}; }
KVASIR_INLINE f64x8 mul(f64x8 a, f64x8 b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
KVASIR_INLINE f64x8 min(f64x8 a, f64x8 b) { return {_mm256_min_pd(a.low, b.low), _mm256_min_pd(a.high, b.high)}; }
KVASIR_INLINE f64x8 max(f64x8 a, f64x8 b) { return {_mm256_max_pd(a.low, b.low), _mm256_max_pd(a.high, b.high)}; }
KVASIR_INLINE i64x8 float_to_bits(f64x8 a) { return {_mm256_castpd_si256(a.low), _mm256_castpd_si256(a.high)}; }
KVASIR_INLINE f64x8 bits_to_float(i64x8 a) { return {_mm256_castsi256_pd(a.low), _mm256_castsi256_pd(a.high)}; }

KVASIR_INLINE i64x8 broadcast_i64(int64_t value) { return {_mm256_set1_epi64x(value), _mm256_set1_epi64x(value)}; }
KVASIR_INLINE i64x8 load(const int64_t* from) { return {load_256(from), load_256(from + 4)}; }
KVASIR_INLINE void store(int64_t* to, i64x8 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4), a.high);
}
KVASIR_INLINE i64x8 add(i64x8 a, i64x8 b) {
    return {_mm256_add_epi64(a.low, b.low), _mm256_add_epi64(a.high, b.high)};
}
KVASIR_INLINE i64x8 sub(i64x8 a, i64x8 b) {
    return {_mm256_sub_epi64(a.low, b.low), _mm256_sub_epi64(a.high, b.high)};
}
KVASIR_INLINE i64x8 bit_and(i64x8 a, i64x8 b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
KVASIR_INLINE i64x8 bit_or(i64x8 a, i64x8 b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
KVASIR_INLINE i64x8 bit_xor(i64x8 a, i64x8 b) {
    return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
template <int N>
KVASIR_INLINE i64x8 shift_left(i64x8 a) {
    return {_mm256_slli_epi64(a.low, N), _mm256_slli_epi64(a.high, N)};
}
template <int N>
KVASIR_INLINE i64x8 shift_right(i64x8 a) {  // of unsigned numbers
    return {_mm256_srli_epi64(a.low, N), _mm256_srli_epi64(a.high, N)};
}
// The products of the low halves, unsigned.
KVASIR_INLINE i64x8 multiply_words(i64x8 a, i64x8 b) {
    return {_mm256_mul_epu32(a.low, b.low), _mm256_mul_epu32(a.high, b.high)};
}
KVASIR_INLINE void store_pairs(int64_t* to, __m256i a, __m256i b) {
    const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4), _mm256_permute2x128_si256(even, odd, 0x31));
}
// a[0] b[0] a[1] b[1] ... a[7] b[7]
KVASIR_INLINE void store_pairs(int64_t* to, i64x8 a, i64x8 b) {
    store_pairs(to, a.low, b.low);
    store_pairs(to + 8, a.high, b.high);
}

// Bit i where a[i] >= b[i].
KVASIR_INLINE uint32_t at_least(f64x8 a, f64x8 b) {
    const int low = _mm256_movemask_pd(_mm256_cmp_pd(a.low, b.low, _CMP_GE_OQ));
    return static_cast<uint32_t>(low | _mm256_movemask_pd(_mm256_cmp_pd(a.high, b.high, _CMP_GE_OQ)) << 4);
}
KVASIR_INLINE f32x16 to_single(f64x8 low, f64x8 high) {
    return {_mm256_set_m128(_mm256_cvtpd_ps(low.high), _mm256_cvtpd_ps(low.low)),
            _mm256_set_m128(_mm256_cvtpd_ps(high.high), _mm256_cvtpd_ps(high.low))};
}
// table[a[i] & 31]
KVASIR_INLINE f32x16 pick32(const float* table, i32x16 a) {
    const __m256i most = _mm256_set1_epi32(31);
    return {_mm256_i32gather_ps(table, _mm256_and_si256(a.low, most), 4),
            _mm256_i32gather_ps(table, _mm256_and_si256(a.high, most), 4)};
}

// Lane i as bit i, and back.
KVASIR_INLINE uint32_t lanes(mask16 m) {
    return static_cast<uint32_t>(_mm256_movemask_ps(m.low) | _mm256_movemask_ps(m.high) << 8);
}
KVASIR_INLINE __m256 mask_of_eight(uint32_t bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(bits)), bit);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit));
}
KVASIR_INLINE mask16 mask_of(uint32_t bits) { return {mask_of_eight(bits), mask_of_eight(bits >> 8)}; }

#else

struct f64x8 {
    double v[8];
};
struct i64x8 {
    uint64_t v[8];
};

#define KVASIR_EACH_OF_8 for (int64_t i = 0; i < 8; ++i)

KVASIR_INLINE f64x8 broadcast_f64(double value) {
    f64x8 a;
    KVASIR_EACH_OF_8 a.v[i] = value;
    return a;
}
KVASIR_INLINE f64x8 low_to_double(f32x16 a) {
    f64x8 b;
    KVASIR_EACH_OF_8 b.v[i] = a.v[i];
    return b;
}
KVASIR_INLINE f64x8 high_to_double(f32x16 a) {
    f64x8 b;
    KVASIR_EACH_OF_8 b.v[i] = a.v[8 + i];
    return b;
}
KVASIR_INLINE f64x8 add(f64x8 a, f64x8 b) {
    KVASIR_EACH_OF_8 a.v[i] += b.v[i];
    return a;
}
KVASIR_INLINE f64x8 sub(f64x8 a, f64x8 b) {
    KVASIR_EACH_OF_8 a.v[i] -= b.v[i];
    return a;
}
KVASIR_INLINE f64x8 mul(f64x8 a, f64x8 b) {
    KVASIR_EACH_OF_8 a.v[i] *= b.v[i];
    return a;
}
KVASIR_INLINE f64x8 min(f64x8 a, f64x8 b) {
    KVASIR_EACH_OF_8 b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return b;
}
KVASIR_INLINE f64x8 max(f64x8 a, f64x8 b) {
    KVASIR_EACH_OF_8 b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return b;
}
KVASIR_INLINE i64x8 float_to_bits(f64x8 a) {
    i64x8 b;
    std::memcpy(b.v, a.v, sizeof b.v);
    return b;
}
KVASIR_INLINE f64x8 bits_to_float(i64x8 a) {
    f64x8 b;
    std::memcpy(b.v, a.v, sizeof b.v);
    return b;
}

KVASIR_INLINE i64x8 broadcast_i64(int64_t value) {
    i64x8 a;
    KVASIR_EACH_OF_8 a.v[i] = static_cast<uint64_t>(value);
    return a;
}
KVASIR_INLINE i64x8 load(const int64_t* from) {
    i64x8 a;
    std::memcpy(a.v, from, sizeof a.v);
    return a;
}
KVASIR_INLINE void store(int64_t* to, i64x8 a) { std::memcpy(to, a.v, sizeof a.v); }
KVASIR_INLINE i64x8 add(i64x8 a, i64x8 b) {
    KVASIR_EACH_OF_8 a.v[i] += b.v[i];
    return a;
}
KVASIR_INLINE i64x8 sub(i64x8 a, i64x8 b) {
    KVASIR_EACH_OF_8 a.v[i] -= b.v[i];
    return a;
}
KVASIR_INLINE i64x8 bit_and(i64x8 a, i64x8 b) {
    KVASIR_EACH_OF_8 a.v[i] &= b.v[i];
    return a;
}
KVASIR_INLINE i64x8 bit_or(i64x8 a, i64x8 b) {
    KVASIR_EACH_OF_8 a.v[i] |= b.v[i];
    return a;
}
KVASIR_INLINE i64x8 bit_xor(i64x8 a, i64x8 b) {
    KVASIR_EACH_OF_8 a.v[i] ^= b.v[i];
    return a;
}
template <int N>
KVASIR_INLINE i64x8 shift_left(i64x8 a) {
    KVASIR_EACH_OF_8 a.v[i] <<= N;
    return a;
}
template <int N>
KVASIR_INLINE i64x8 shift_right(i64x8 a) {  // of unsigned numbers
    KVASIR_EACH_OF_8 a.v[i] >>= N;
    return a;
}
// The products of the low halves, unsigned.
KVASIR_INLINE i64x8 multiply_words(i64x8 a, i64x8 b) {
    KVASIR_EACH_OF_8 a.v[i] = (a.v[i] & 0xffffffffu) * (b.v[i] & 0xffffffffu);
    return a;
}
// a[0] b[0] a[1] b[1] ... a[7] b[7]
KVASIR_INLINE void store_pairs(int64_t* to, i64x8 a, i64x8 b) {
    KVASIR_EACH_OF_8 {
        to[2 * i] = static_cast<int64_t>(a.v[i]);
        to[2 * i + 1] = static_cast<int64_t>(b.v[i]);
    }
}

// Bit i where a[i] >= b[i].
KVASIR_INLINE uint32_t at_least(f64x8 a, f64x8 b) {
    uint32_t bits = 0;
    KVASIR_EACH_OF_8 bits |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
    return bits;
}
KVASIR_INLINE f32x16 to_single(f64x8 low, f64x8 high) {
    f32x16 a;
    KVASIR_EACH_OF_8 {
        a.v[i] = static_cast<float>(low.v[i]);
        a.v[8 + i] = static_cast<float>(high.v[i]);
    }
    return a;
}
// table[a[i] & 31]
KVASIR_INLINE f32x16 pick32(const float* table, i32x16 a) {
    f32x16 b;
    KVASIR_EACH b.v[i] = table[a.v[i] & 31];
    return b;
}

// Lane i as bit i, and back.
KVASIR_INLINE uint32_t lanes(mask16 m) {
    uint32_t bits = 0;
    KVASIR_EACH bits |= static_cast<uint32_t>(m.v[i]) << i;
    return bits;
}
KVASIR_INLINE mask16 mask_of(uint32_t bits) {
    mask16 m;
    KVASIR_EACH m.v[i] = (bits >> i & 1u) != 0;
    return m;
}

#endif

KVASIR_INLINE f64x8 load_f64(const double* from) { return bits_to_float(load(reinterpret_cast<const int64_t*>(from))); }
KVASIR_INLINE void store_f64(double* to, f64x8 a) { store(reinterpret_cast<int64_t*>(to), float_to_bits(a)); }

// Of integers from 0 to 2^52 - 1.
KVASIR_INLINE f64x8 to_double(i64x8 a) {
    const f64x8 one = broadcast_f64(0x1p52);
    return sub(bits_to_float(bit_or(a, float_to_bits(one))), one);
}

#if !defined(KVASIR_AVX512)
// The lanes whose bits are set, one after another. Memory for all lanes may be written.
template <int N, typename T>
KVASIR_INLINE void pack_lanes(T* to, const T (&lane)[N], uint32_t bits) {
    int64_t count = 0;
    for (int i = 0; i < N; ++i) {
        to[count] = lane[i];
        count += bits >> i & 1u;
    }
}
KVASIR_INLINE void pack(int32_t* to, i32x16 a, uint32_t bits) {
    int32_t lane[16];
    store(lane, a);
    pack_lanes(to, lane, bits);
}
KVASIR_INLINE void pack(double* to, f64x8 a, uint32_t bits) {
    double lane[8];
    store_f64(lane, a);
    pack_lanes(to, lane, bits);
}
#endif

KVASIR_INLINE int64_t sum(i64x8 a) {
    int64_t lane[8];
    store(lane, a);
    int64_t total = 0;
    for (int64_t i = 0; i < 8; ++i) total += lane[i];
    return total;
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
