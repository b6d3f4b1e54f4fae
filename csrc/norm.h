// RMSNorm over float32 rows; the contract stands in kvasir_cpu.h.
#pragma once

#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {

inline float sum_of_squares(const float* x, int64_t cols) {
    f32x16 total = broadcast(0.0f);
    int64_t i = 0;
    for (; i + LANES <= cols; i += LANES) {
        const f32x16 a = load(x + i);
        total = fma(a, a, total);
    }
    if (i < cols) {
        const f32x16 a = load_first(x + i, cols - i);
        total = fma(a, a, total);
    }
    return sum(total);
}

inline void scale_row(float* out, const float* x, const float* weight, int64_t cols, float factor) {
    const f32x16 scale = broadcast(factor);
    int64_t i = 0;
    for (; i + LANES <= cols; i += LANES) {
        store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
    }
    if (i < cols) {
        const f32x16 scaled = mul(load_first(x + i, cols - i), scale);
        store_first(out + i, mul(scaled, load_first(weight + i, cols - i)), cols - i);
    }
}

inline void rms_norm_f32(float* out, const float* x, const float* weight, int64_t rows, int64_t cols, float eps) {
    for (int64_t row = 0; row < rows; ++row, x += cols, out += cols) {
        const float mean = sum_of_squares(x, cols) / static_cast<float>(cols);
        // A true division and square root: the processors' estimate instructions differ from one another.
        scale_row(out, x, weight, cols, 1.0f / __builtin_sqrtf(mean + eps));
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
