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

// How far x[i] exceeds the row's mean plus so many standard deviations, 0 where it does not. x, out: [rows, cols]. out
// may be x. Both sums have the order of kvasir_rms_norm_f32.
KVASIR_API void kvasir_gaussian_cut(float* out, const float* x, int64_t rows, int64_t cols, float deviations) {
    const FloatMode mode;
    kernels().gaussian_cut(out, x, rows, cols, deviations);
}

// x times the root of the mean square of `like`, divided by that of x, whose mean square counts as at least `least`. x,
// like, out: [rows, cols]. out may be x or like.
KVASIR_API void kvasir_match(float* out, const float* x, const float* like, int64_t rows, int64_t cols, float least) {
    const FloatMode mode;
    kernels().match(out, x, like, rows, cols, least);
}

// out[j] = x[j] + the sum over s, ascending, of x[s] * coefs[j][s], by fused multiply-adds. x, out: [rows, streams,
// cols]; coefs: [rows, streams, streams]. out is not x.
KVASIR_API void kvasir_predict_streams(float* out, const float* x, const float* coefs, int64_t rows, int64_t streams,
                                       int64_t cols) {
    const FloatMode mode;
    kernels().predict_streams(out, x, coefs, rows, streams, cols);
}

// out[s] = x[s] + (computed - x[active]) * (coefs[s] + 1), by a fused multiply-add. x, out: [rows, streams, cols];
// computed: [rows, cols]; coefs: [rows, streams]. out may be x. active is below streams.
KVASIR_API void kvasir_correct_streams(float* out, const float* x, const float* computed, const float* coefs,
                                       int64_t rows, int64_t streams, int64_t cols, int64_t active) {
    const FloatMode mode;
    kernels().correct_streams(out, x, computed, coefs, rows, streams, cols, active);
}
