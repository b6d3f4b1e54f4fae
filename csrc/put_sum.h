// The end of a product with an integer format.
#pragma once

#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// out = residual + (bias + sum) for the first `cols` of 16 columns; bias and residual may be null.
KVASIR_INLINE void put_sum(float* out, f32x16 sum, const float* bias, const float* residual, int64_t cols) {
    const bool whole = cols == LANES;
    if (bias) sum = add(sum, whole ? load(bias) : load_first(bias, cols));
    if (residual) sum = add(whole ? load(residual) : load_first(residual, cols), sum);
    if (whole) store(out, sum);
    else store_first(out, sum, cols);
}

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
