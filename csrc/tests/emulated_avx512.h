// AVX-512 without AVX-512: the instructions that simd_avx512.h and simd64.h use, made of those of AVX2, so that their
// code runs on a machine that has no more (make emulate). CMake includes this file before all others. SIMDe
// (https://github.com/simd-everywhere/simde, 0.7.4 or newer) gives most of them. Here are those that it lacks, and three
// products that it computes very slowly or, for bfloat16, without fma. Each follows the operation in Intel's Software
// Developer's Manual, volume 2; denormals are flushed if the caller's mode says so, as for all kernels but the sampler.
//
// The compiler must not be allowed AVX-512. An intrinsic that neither has does not compile.
#pragma once

#if defined(__AVX512F__) || !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "emulation needs -mavx2 -mfma -mf16c and no -mavx512: a product without fma would round twice"
#endif

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

#pragma GCC diagnostic push
// As a template's argument a vector type loses its attributes, which copying does not need.
#pragma GCC diagnostic ignored "-Wignored-attributes"

namespace kvasir_emulated {

#define KVASIR_EMULATED static inline __attribute__((always_inline))

// The 512 bits of a vector in two halves, or the other way round.
template <typename Half>
struct Halves {
    Half low, high;
};
template <typename To, typename From>
KVASIR_EMULATED To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
template <typename From>
KVASIR_EMULATED Halves<__m256i> integers(const From& from) {
    return as<Halves<__m256i>>(from);
}
KVASIR_EMULATED Halves<__m256> floats(__m512 from) { return as<Halves<__m256>>(from); }
KVASIR_EMULATED __m512 whole(__m256 low, __m256 high) { return as<__m512>(Halves<__m256>{low, high}); }
KVASIR_EMULATED __m512d whole(__m256d low, __m256d high) { return as<__m512d>(Halves<__m256d>{low, high}); }
KVASIR_EMULATED __m512i whole(__m256i low, __m256i high) { return as<__m512i>(Halves<__m256i>{low, high}); }

// --- conversions -------------------------------------------------------------------------------------------

KVASIR_EMULATED __m512 cvtepi32_ps(__m512i a) {
    return whole(_mm256_cvtepi32_ps(integers(a).low), _mm256_cvtepi32_ps(integers(a).high));
}
KVASIR_EMULATED __m512i cvtps_epi32(__m512 a) {
    return whole(_mm256_cvtps_epi32(floats(a).low), _mm256_cvtps_epi32(floats(a).high));
}
KVASIR_EMULATED __m512d cvtps_pd(__m256 a) {
    return whole(_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
}
KVASIR_EMULATED __m256 cvtpd_ps(__m512d a) {
    const Halves<__m256d> half = as<Halves<__m256d>>(a);
    return _mm256_set_m128(_mm256_cvtpd_ps(half.high), _mm256_cvtpd_ps(half.low));
}
KVASIR_EMULATED __m512i cvtepu8_epi32(__m128i a) {
    return whole(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)));
}
KVASIR_EMULATED __m512i cvtepi8_epi32(__m128i a) {
    return whole(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
KVASIR_EMULATED __m512i cvtepu8_epi16(__m256i a) {
    return whole(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)), _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1)));
}
KVASIR_EMULATED __m512i cvtepu16_epi32(__m256i a) {
    return whole(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                 _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
template <typename Narrow, typename Result>
KVASIR_EMULATED Result low_bits(__m512i a) {  // of each word; without saturation
    uint32_t wide[16];
    Narrow narrow[16];
    std::memcpy(wide, &a, sizeof wide);
    for (int i = 0; i < 16; ++i) narrow[i] = static_cast<Narrow>(wide[i]);
    return as<Result>(narrow);
}
KVASIR_EMULATED __m128i cvtepi32_epi8(__m512i a) { return low_bits<uint8_t, __m128i>(a); }
KVASIR_EMULATED __m256i cvtepi32_epi16(__m512i a) { return low_bits<uint16_t, __m256i>(a); }

KVASIR_EMULATED __m512 cvtph_ps(__m256i a) {
    return whole(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
template <int ROUNDING>
KVASIR_EMULATED __m256i cvtps_ph(__m512 a) {
    // The 256-bit form has no bit for exceptions, which are masked anyway.
    constexpr int ROUND = ROUNDING & ~_MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(floats(a).high, ROUND), _mm256_cvtps_ph(floats(a).low, ROUND));
}
// To the nearest, halves to even; denormals to zeros with their signs; NaN becomes quiet and keeps its upper bits.
KVASIR_EMULATED __m256i cvtneps_pbh(__m512 a) {
    uint32_t bits[16];
    uint16_t rounded[16];
    std::memcpy(bits, &a, sizeof bits);
    for (int i = 0; i < 16; ++i) {
        const uint32_t size = bits[i] & 0x7fffffffu, upper = bits[i] >> 16;
        const uint32_t nearest = (bits[i] + 0x7fffu + (upper & 1u)) >> 16;
        rounded[i] = static_cast<uint16_t>(size < 0x00800000u   ? upper & 0x8000u
                                           : size > 0x7f800000u ? upper | 0x40u
                                                                : nearest);
    }
    return as<__m256i>(rounded);
}

// --- products ----------------------------------------------------------------------------------------------

// Four unsigned bytes of a times four signed bytes of b, added to each word without saturation.
KVASIR_EMULATED __m256i add_byte_products(__m256i acc, __m256i a, __m256i b) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
KVASIR_EMULATED __m512i dpbusd_epi32(__m512i acc, __m512i a, __m512i b) {
    const Halves<__m256i> sum = integers(acc), x = integers(a), y = integers(b);
    return whole(add_byte_products(sum.low, x.low, y.low), add_byte_products(sum.high, x.high, y.high));
}
KVASIR_EMULATED __m512i dpwssd_epi32(__m512i acc, __m512i a, __m512i b) {
    const Halves<__m256i> sum = integers(acc), x = integers(a), y = integers(b);
    return whole(_mm256_add_epi32(sum.low, _mm256_madd_epi16(x.low, y.low)),
                 _mm256_add_epi32(sum.high, _mm256_madd_epi16(x.high, y.high)));
}
// The odd products first, then the even ones, each fused with its sum.
KVASIR_EMULATED __m256 add_bf16_products(__m256 acc, __m256i a, __m256i b) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
    const __m256 odd_a = _mm256_castsi256_ps(_mm256_and_si256(a, upper));
    const __m256 odd_b = _mm256_castsi256_ps(_mm256_and_si256(b, upper));
    const __m256 even_a = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
    const __m256 even_b = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
    return _mm256_fmadd_ps(even_a, even_b, _mm256_fmadd_ps(odd_a, odd_b, acc));
}
template <typename Pairs>
KVASIR_EMULATED __m512 dpbf16_ps(__m512 acc, const Pairs& a, const Pairs& b) {
    return whole(add_bf16_products(floats(acc).low, integers(a).low, integers(b).low),
                 add_bf16_products(floats(acc).high, integers(a).high, integers(b).high));
}

// --- parts, masks ------------------------------------------------------------------------------------------

template <int PLACE>
KVASIR_EMULATED __m256 extractf32x8_ps(__m512 a) {
    return PLACE == 0 ? floats(a).low : floats(a).high;
}
KVASIR_EMULATED __mmask32 cmplt_epu16_mask(__m512i a, __m512i b) {
    uint16_t x[32], y[32];
    std::memcpy(x, &a, sizeof x);
    std::memcpy(y, &b, sizeof y);
    __mmask32 mask = 0;
    for (int i = 0; i < 32; ++i) mask |= static_cast<__mmask32>(x[i] < y[i]) << i;
    return mask;
}
// Masked lanes touch no memory.
KVASIR_EMULATED __m512 maskz_loadu_ps(__mmask16 mask, const void* from) {
    float lanes[16] = {};
    for (int i = 0; i < 16; ++i) {
        if (mask >> i & 1) std::memcpy(lanes + i, static_cast<const float*>(from) + i, sizeof lanes[i]);
    }
    return as<__m512>(lanes);
}
KVASIR_EMULATED void mask_storeu_ps(void* to, __mmask16 mask, __m512 a) {
    float lanes[16];
    std::memcpy(lanes, &a, sizeof lanes);
    for (int i = 0; i < 16; ++i) {
        if (mask >> i & 1) std::memcpy(static_cast<float*>(to) + i, lanes + i, sizeof lanes[i]);
    }
}
KVASIR_EMULATED float reduce_max_ps(__m512 a) {
    __m256 most = _mm256_max_ps(floats(a).low, floats(a).high);
    most = _mm256_max_ps(most, _mm256_permute2f128_ps(most, most, 1));
    most = _mm256_max_ps(most, _mm256_permute_ps(most, 0x4e));
    return _mm256_cvtss_f32(_mm256_max_ps(most, _mm256_permute_ps(most, 0xb1)));
}
KVASIR_EMULATED int32_t reduce_add_epi32(__m512i a) {
    int32_t lanes[16], sum = 0;
    std::memcpy(lanes, &a, sizeof lanes);
    for (int32_t lane : lanes) sum += lane;
    return sum;
}

#undef KVASIR_EMULATED

}  // namespace kvasir_emulated

#pragma GCC diagnostic pop

#undef _mm512_cvtepi32_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvtps_pd
#undef _mm512_cvtpd_ps
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu8_epi16
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi8
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtneps_pbh
#undef _mm512_dpbusd_epi32
#undef _mm512_dpwssd_epi32
#undef _mm512_dpbf16_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_cmplt_epu16_mask
#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#undef _mm512_reduce_max_ps
#undef _mm512_reduce_add_epi32
#define _mm512_cvtepi32_ps kvasir_emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 kvasir_emulated::cvtps_epi32
#define _mm512_cvtps_pd kvasir_emulated::cvtps_pd
#define _mm512_cvtpd_ps kvasir_emulated::cvtpd_ps
#define _mm512_cvtepu8_epi32 kvasir_emulated::cvtepu8_epi32
#define _mm512_cvtepi8_epi32 kvasir_emulated::cvtepi8_epi32
#define _mm512_cvtepu8_epi16 kvasir_emulated::cvtepu8_epi16
#define _mm512_cvtepu16_epi32 kvasir_emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi8 kvasir_emulated::cvtepi32_epi8
#define _mm512_cvtepi32_epi16 kvasir_emulated::cvtepi32_epi16
#define _mm512_cvtph_ps kvasir_emulated::cvtph_ps
#define _mm512_cvtps_ph(a, rounding) kvasir_emulated::cvtps_ph<(rounding)>(a)
#define _mm512_cvtneps_pbh kvasir_emulated::cvtneps_pbh
#define _mm512_dpbusd_epi32 kvasir_emulated::dpbusd_epi32
#define _mm512_dpwssd_epi32 kvasir_emulated::dpwssd_epi32
#define _mm512_dpbf16_ps kvasir_emulated::dpbf16_ps
#define _mm512_extractf32x8_ps(a, place) kvasir_emulated::extractf32x8_ps<(place)>(a)
#define _mm512_cmplt_epu16_mask kvasir_emulated::cmplt_epu16_mask
#define _mm512_maskz_loadu_ps kvasir_emulated::maskz_loadu_ps
#define _mm512_mask_storeu_ps kvasir_emulated::mask_storeu_ps
#define _mm512_reduce_max_ps kvasir_emulated::reduce_max_ps
#define _mm512_reduce_add_epi32 kvasir_emulated::reduce_add_epi32
