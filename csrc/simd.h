// Sixteen float32 lanes, in three bodies with the same results: AVX-512, AVX2 with FMA, and plain C++.
//
// It holds what the kernels use and no more. Everything lives in the namespace of the instruction set being compiled
// (KVASIR_ISA), and nothing of the standard library is instantiated here: a template shared between translation
// units would be kept once by the linker, perhaps in the body that this machine cannot run.
#pragma once

#include <cstdint>

#if defined(__FAST_MATH__)
#error "the kernels fix the order and rounding of every operation: build without -ffast-math and -Ofast"
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvasir {
namespace KVASIR_ISA {

constexpr int64_t LANES = 16;

#if defined(__AVX512F__) && defined(__AVX512DQ__)

struct f32x16 {
    __m512 v;
};

inline f32x16 broadcast(float value) { return {_mm512_set1_ps(value)}; }
inline f32x16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store(float* to, f32x16 a) { _mm512_storeu_ps(to, a.v); }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

inline __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }

// The first `count` (1 to 15) floats, zeros in the other lanes; memory behind them is not touched.
inline f32x16 load_first(const float* from, int64_t count) { return {_mm512_maskz_loadu_ps(first(count), from)}; }
inline void store_first(float* to, f32x16 a, int64_t count) { _mm512_mask_storeu_ps(to, first(count), a.v); }

#elif defined(__AVX2__) && defined(__FMA__)

struct f32x16 {
    __m256 low, high;
};

inline f32x16 broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline f32x16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, f32x16 a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

inline __m256i first(int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(count)), lane);
}

// The first `count` (1 to 15) floats, zeros in the other lanes; memory behind them is not touched.
inline f32x16 load_first(const float* from, int64_t count) {
    const __m256 low = _mm256_maskload_ps(from, first(count));
    if (count <= 8) return {low, _mm256_setzero_ps()};
    return {low, _mm256_maskload_ps(from + 8, first(count - 8))};
}
inline void store_first(float* to, f32x16 a, int64_t count) {
    _mm256_maskstore_ps(to, first(count), a.low);
    if (count > 8) _mm256_maskstore_ps(to + 8, first(count - 8), a.high);
}

#else

struct f32x16 {
    float v[LANES];
};

inline f32x16 broadcast(float value) {
    f32x16 a;
    for (float& lane : a.v) lane = value;
    return a;
}
inline f32x16 load(const float* from) {
    f32x16 a;
    for (int64_t i = 0; i < LANES; ++i) a.v[i] = from[i];
    return a;
}
inline void store(float* to, f32x16 a) {
    for (int64_t i = 0; i < LANES; ++i) to[i] = a.v[i];
}
inline f32x16 mul(f32x16 a, f32x16 b) {
    for (int64_t i = 0; i < LANES; ++i) a.v[i] *= b.v[i];
    return a;
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    for (int64_t i = 0; i < LANES; ++i) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
}

// The first `count` (1 to 15) floats, zeros in the other lanes; memory behind them is not touched.
inline f32x16 load_first(const float* from, int64_t count) {
    f32x16 a = broadcast(0.0f);
    for (int64_t i = 0; i < count; ++i) a.v[i] = from[i];
    return a;
}
inline void store_first(float* to, f32x16 a, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = a.v[i];
}

#endif

// The sum of the lanes by the one tree there is: l with l+8, then with l+4, l+2, l+1. It is short enough to be
// written once for all three bodies.
inline float sum(f32x16 a) {
    float lane[LANES];
    store(lane, a);
    for (int64_t half = LANES / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
