// The weights of float matrices that are multiplied by float32 rows.
#pragma once

#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// COLUMNS columns of a panel's 16 rows, and their product with the same columns of one row of activations of type X.
// Weights are stored as Number; `widen` converts 16 of them to float32.
struct WeightF32 {
    using X = float;
    using Number = float;
    static constexpr int64_t COLUMNS = 1, BYTES = 64, GROUP = 0;
    static KVASIR_INLINE f32x16 widen(const Number* from) { return load(from); }
    f32x16 w;
    KVASIR_INLINE explicit WeightF32(const uint8_t* from) : w(load(reinterpret_cast<const Number*>(from))) {}
    KVASIR_INLINE f32x16 add_to(f32x16 sum, const X* x) const { return fma(w, broadcast(x[0]), sum); }
    KVASIR_INLINE f32x16 add_first_to(f32x16 sum, const X* x) const { return add_to(sum, x); }
};

struct WeightF16 {
    using X = float;
    using Number = uint16_t;
    static constexpr int64_t COLUMNS = 1, BYTES = 32, GROUP = 0;
    static KVASIR_INLINE f32x16 widen(const Number* from) { return load_f16(from); }
    f32x16 w;
    KVASIR_INLINE explicit WeightF16(const uint8_t* from) : w(load_f16(reinterpret_cast<const Number*>(from))) {}
    KVASIR_INLINE f32x16 add_to(f32x16 sum, const X* x) const { return fma(w, broadcast(x[0]), sum); }
    KVASIR_INLINE f32x16 add_first_to(f32x16 sum, const X* x) const { return add_to(sum, x); }
};

struct WeightBF16 {
    using X = float;
    using Number = uint16_t;
    static constexpr int64_t COLUMNS = 2, BYTES = 64, GROUP = 0;
    static KVASIR_INLINE f32x16 widen(const Number* from) { return load_bf16(from); }
    u16x32 pairs;
    KVASIR_INLINE explicit WeightBF16(const uint8_t* from)
        : pairs(load_pairs(reinterpret_cast<const uint16_t*>(from))) {}
    KVASIR_INLINE f32x16 add_to(f32x16 sum, const X* x) const {
        return fma(odd_bf16(pairs), broadcast(x[1]), fma(even_bf16(pairs), broadcast(x[0]), sum));
    }
    // Of the first column only: the second is padding.
    KVASIR_INLINE f32x16 add_first_to(f32x16 sum, const X* x) const {
        return fma(even_bf16(pairs), broadcast(x[0]), sum);
    }
};

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
