// The C ABI of the row kernels, for tests and for the native implementations of single ops.
#include "dispatch.h"
#include "kvasir_cpu.h"

using kvasir::FloatMode;
using kvasir::kernels;

void kvasir_rms_norm_f32(float* out, const float* x, const float* weight, int64_t rows, int64_t cols, float eps) {
    const FloatMode mode;
    kernels().rms_norm(out, cols, x, cols, weight, rows, cols, eps);
}

// LayerNorm of float32 rows (Ba et al., 2016): out = (x - mean) / sqrt(variance + eps) * weight + bias.
// x, out: [rows, cols]; weight, bias: [cols]. out may be x. cols is at least 1 and below 2^24. Both sums have the order
// of kvasir_rms_norm_f32; weight and bias are applied by one fused multiply-add.
KVASIR_API void kvasir_layer_norm(float* out, const float* x, const float* weight, const float* bias, int64_t rows,
                                  int64_t cols, float eps) {
    const FloatMode mode;
    kernels().layer_norm(out, cols, x, cols, weight, bias, rows, cols, eps);
}

// Rotary embedding: rotates the dimensions i and i + half of each head by the row's angle i, for i < half. Dimensions
// from 2 * half on are copied. 2 * half must not exceed head_dim.
// x, out: [rows, heads, head_dim]; cos, sin: [rows, half]. out may be x.
KVASIR_API void kvasir_rope(float* out, const float* x, const float* cos, const float* sin, int64_t rows, int64_t heads,
                            int64_t head_dim, int64_t half) {
    const FloatMode mode;
    const int64_t stride = heads * head_dim;
    kernels().rope(out, stride, x, stride, cos, sin, half, rows, heads, head_dim, half);
}

// out[i] = f(x[i]), where f is one of `Function` in rows.h; any other value is the identity. out may be x.
KVASIR_API void kvasir_activate(int32_t function, float* out, const float* x, int64_t count) {
    const FloatMode mode;
    kernels().activate(function, out, x, count);
}

// out[i] = f(gate[i]) * up[i]. out may be gate or up.
KVASIR_API void kvasir_gated(int32_t function, float* out, const float* gate, const float* up, int64_t count) {
    const FloatMode mode;
    kernels().gated(function, out, gate, up, count);
}

// out[i] = cap * tanh(x[i] / cap). out may be x. cap must be positive.
KVASIR_API void kvasir_softcap(float* out, const float* x, float cap, int64_t count) {
    const FloatMode mode;
    kernels().softcap(out, x, cap, count);
}

// out[i] = x[i] within [low, high]. out may be x. NaN stays NaN.
KVASIR_API void kvasir_clamp(float* out, const float* x, float low, float high, int64_t count) {
    const FloatMode mode;
    kernels().clamp(out, x, low, high, count);
}

// xIELU (arXiv:2411.13010): a x^2 + beta x where x > 0, else b (e^min(x, eps) - 1 - x) + beta x. out may be x.
// settings: a, b, beta, eps.
KVASIR_API void kvasir_xielu(float* out, const float* x, const float* settings, int64_t count) {
    const FloatMode mode;
    kernels().xielu(out, x, settings, count);
}
