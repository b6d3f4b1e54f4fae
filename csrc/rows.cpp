// Row kernels. Their contracts are in kernels.h and abi_rows.cpp.
//
// The last elements of a row, fewer than a vector, are computed by the same operations as the others, so that an
// element's bits do not depend on its index.
#include "rows.h"

#include "simd_math.h"

namespace kvasir {
namespace KVASIR_ISA {

// Load and store a vector, or only its first `count` lanes at the end of a row.
KVASIR_INLINE f32x16 load_some(const float* from, int64_t count) {
    return count < LANES ? load_first(from, count) : load(from);
}
KVASIR_INLINE void store_some(float* to, f32x16 a, int64_t count) {
    count < LANES ? store_first(to, a, count) : store(to, a);
}

static float sum_of_row(const float* x, int64_t cols) {
    f32x16 total = broadcast(0.0f);
    for (int64_t i = 0; i < cols; i += LANES) total = add(total, load_some(x + i, cols - i));
    return sum(total);
}

// The sum of (x - centre)^2.
static float sum_of_squares(const float* x, int64_t cols, float centre) {
    const f32x16 c = broadcast(centre);
    f32x16 total = broadcast(0.0f);
    int64_t i = 0;
    for (; i + LANES <= cols; i += LANES) {
        const f32x16 a = sub(load(x + i), c);
        total = fma(a, a, total);
    }
    if (i < cols) {
        const f32x16 a = select(first_lanes(cols - i), sub(load_first(x + i, cols - i), c), broadcast(0.0f));
        total = fma(a, a, total);
    }
    return sum(total);
}

// Uses exact division and square root: the estimate instructions of processors differ in their results.
static float inverse_root(float mean, float eps) { return 1.0f / __builtin_sqrtf(mean + eps); }

// out[i] = f(a[i]), f(a[i], b[i]) or f(a[i], b[i], c[i]).
template <typename F>
static void map(float* out, const float* a, int64_t count, F f) {
    for (int64_t i = 0; i < count; i += LANES) store_some(out + i, f(load_some(a + i, count - i)), count - i);
}

template <typename F>
static void map(float* out, const float* a, const float* b, int64_t count, F f) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t rest = count - i;
        store_some(out + i, f(load_some(a + i, rest), load_some(b + i, rest)), rest);
    }
}

template <typename F>
static void map(float* out, const float* a, const float* b, const float* c, int64_t count, F f) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t rest = count - i;
        store_some(out + i, f(load_some(a + i, rest), load_some(b + i, rest), load_some(c + i, rest)), rest);
    }
}

namespace {

struct None {
    KVASIR_INLINE f32x16 operator()(f32x16 x) const { return x; }
};
struct Silu {
    KVASIR_INLINE f32x16 operator()(f32x16 x) const {
        return div(x, add(broadcast(1.0f), exp(sub(broadcast(0.0f), x))));
    }
};
struct Gelu {
    KVASIR_INLINE f32x16 operator()(f32x16 x) const {
        const f32x16 p = add(broadcast(1.0f), erf(mul(x, broadcast(0.707106781f))));
        return mul(mul(x, broadcast(0.5f)), p);
    }
};
struct GeluTanh {
    KVASIR_INLINE f32x16 operator()(f32x16 x) const {
        const f32x16 inner = fma(mul(mul(x, x), x), broadcast(0.044715f), x);
        const f32x16 p = add(broadcast(1.0f), tanh(mul(inner, broadcast(0.797884561f))));
        return mul(mul(x, broadcast(0.5f)), p);
    }
};
struct Relu {  // NaN stays NaN
    KVASIR_INLINE f32x16 operator()(f32x16 x) const {
        return select(less_equal(x, broadcast(0.0f)), broadcast(0.0f), x);
    }
};
struct Relu2 {
    KVASIR_INLINE f32x16 operator()(f32x16 x) const {
        const f32x16 positive = Relu()(x);
        return mul(positive, positive);
    }
};
struct Above {  // how far x exceeds the bound, 0 if it does not
    f32x16 bound;
    KVASIR_INLINE f32x16 operator()(f32x16 x) const { return Relu()(sub(x, bound)); }
};
struct Ratio {
    f32x16 factor, divisor;
    KVASIR_INLINE f32x16 operator()(f32x16 x) const { return div(mul(x, factor), divisor); }
};
struct Exp {
    KVASIR_INLINE f32x16 operator()(f32x16 x) const { return exp(x); }
};
struct Sigmoid {
    KVASIR_INLINE f32x16 operator()(f32x16 x) const {
        return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(broadcast(0.0f), x))));
    }
};
struct Softplus {
    KVASIR_INLINE f32x16 operator()(f32x16 x) const { return softplus(x); }
};
template <typename F>
struct Gated {
    KVASIR_INLINE f32x16 operator()(f32x16 gate, f32x16 up) const { return mul(F()(gate), up); }
};
struct Scale {
    f32x16 factor;
    KVASIR_INLINE f32x16 operator()(f32x16 x) const { return mul(x, factor); }
    KVASIR_INLINE f32x16 operator()(f32x16 x, f32x16 weight) const { return mul(mul(x, factor), weight); }
};
struct Softcap {
    f32x16 cap;
    KVASIR_INLINE f32x16 operator()(f32x16 x) const { return mul(tanh(div(x, cap)), cap); }
};
struct Clamp {  // NaN stays NaN
    f32x16 low, high;
    KVASIR_INLINE f32x16 operator()(f32x16 x) const { return max(low, min(high, x)); }
};
struct Xielu {
    f32x16 positive, negative, beta, eps;
    KVASIR_INLINE f32x16 operator()(f32x16 x) const {
        const f32x16 straight = mul(beta, x);
        const f32x16 curved = sub(sub(exp(min(eps, x)), broadcast(1.0f)), x);
        return select(less(broadcast(0.0f), x), fma(mul(positive, x), x, straight), fma(curved, negative, straight));
    }
};
struct Centre {
    f32x16 mean, factor;
    KVASIR_INLINE f32x16 operator()(f32x16 x) const { return mul(sub(x, mean), factor); }
    KVASIR_INLINE f32x16 operator()(f32x16 x, f32x16 weight, f32x16 bias) const {
        return fma(mul(sub(x, mean), factor), weight, bias);
    }
};
// g * sigmoid(1.702 g) * (u + 1), where g is at most 7 and u within [-7, 7]: the gate of gpt-oss.
struct ClampedSwiglu {
    KVASIR_INLINE f32x16 operator()(f32x16 gate, f32x16 up) const {
        const f32x16 limit = broadcast(7.0f), one = broadcast(1.0f);
        const f32x16 g = min(limit, gate), u = max(broadcast(-7.0f), min(limit, up));
        return mul(mul(g, Sigmoid()(mul(g, broadcast(1.702f)))), add(u, one));
    }
};
struct Add {
    KVASIR_INLINE f32x16 operator()(f32x16 a, f32x16 b) const { return add(a, b); }
};
struct Multiply {
    KVASIR_INLINE f32x16 operator()(f32x16 a, f32x16 b) const { return mul(a, b); }
};

}  // namespace

void rms_norm(float* out, int64_t out_stride, const float* x, int64_t x_stride, const float* weight, int64_t rows,
              int64_t cols, float eps) {
    for (int64_t row = 0; row < rows; ++row, x += x_stride, out += out_stride) {
        const float factor = inverse_root(sum_of_squares(x, cols, 0.0f) / static_cast<float>(cols), eps);
        const Scale scale{broadcast(factor)};
        weight ? map(out, x, weight, cols, scale) : map(out, x, cols, scale);
    }
}

void layer_norm(float* out, int64_t out_stride, const float* x, int64_t x_stride, const float* weight,
                const float* bias, int64_t rows, int64_t cols, float eps) {
    for (int64_t row = 0; row < rows; ++row, x += x_stride, out += out_stride) {
        const float mean = sum_of_row(x, cols) / static_cast<float>(cols);
        const float factor = inverse_root(sum_of_squares(x, cols, mean) / static_cast<float>(cols), eps);
        const Centre centre{broadcast(mean), broadcast(factor)};
        weight ? map(out, x, weight, bias, cols, centre) : map(out, x, cols, centre);
    }
}

void gaussian_cut(float* out, const float* x, int64_t rows, int64_t cols, float deviations) {
    for (int64_t row = 0; row < rows; ++row, x += cols, out += cols) {
        const float mean = sum_of_row(x, cols) / static_cast<float>(cols);
        const float deviation = __builtin_sqrtf(sum_of_squares(x, cols, mean) / static_cast<float>(cols));
        map(out, x, cols, Above{broadcast(__builtin_fmaf(deviation, deviations, mean))});
    }
}

void match_rows(float* out, const float* x, const float* like, int64_t rows, int64_t cols, float least) {
    for (int64_t row = 0; row < rows; ++row, x += cols, like += cols, out += cols) {
        const float square = sum_of_squares(x, cols, 0.0f) / static_cast<float>(cols);
        const float target = __builtin_sqrtf(sum_of_squares(like, cols, 0.0f) / static_cast<float>(cols));
        const float divisor = __builtin_sqrtf(square < least ? least : square);  // NaN stays NaN
        map(out, x, cols, Ratio{broadcast(target), broadcast(divisor)});
    }
}

// Both halves are read before either is written: out may be x.
static void turn_head(float* out, const float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t rest = half - i;
        const f32x16 a = load_some(x + i, rest), b = load_some(x + half + i, rest);
        const f32x16 c = load_some(cos + i, rest), s = load_some(sin + i, rest);
        store_some(out + i, sub(mul(a, c), mul(b, s)), rest);
        store_some(out + half + i, add(mul(b, c), mul(a, s)), rest);
    }
}

void rope(float* out, int64_t out_stride, const float* x, int64_t x_stride, const float* cos, const float* sin,
          int64_t angle_stride, int64_t rows, int64_t heads, int64_t head_dim, int64_t half) {
    const int64_t turned = 2 * half;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t head = 0; head < heads; ++head) {
            float* to = out + row * out_stride + head * head_dim;
            const float* from = x + row * x_stride + head * head_dim;
            turn_head(to, from, cos + row * angle_stride, sin + row * angle_stride, half);
            if (to != from) map(to + turned, from + turned, head_dim - turned, None());
        }
    }
}

void activate(int32_t function, float* out, const float* x, int64_t count) {
    switch (function) {
        case FUNCTION_SILU: return map(out, x, count, Silu());
        case FUNCTION_GELU: return map(out, x, count, Gelu());
        case FUNCTION_GELU_TANH: return map(out, x, count, GeluTanh());
        case FUNCTION_RELU: return map(out, x, count, Relu());
        case FUNCTION_RELU2: return map(out, x, count, Relu2());
        case FUNCTION_EXP: return map(out, x, count, Exp());
        case FUNCTION_SIGMOID: return map(out, x, count, Sigmoid());
        case FUNCTION_SOFTPLUS: return map(out, x, count, Softplus());
        default: return map(out, x, count, None());
    }
}

void gated(int32_t function, float* out, const float* gate, const float* up, int64_t count) {
    switch (function) {
        case FUNCTION_SILU: return map(out, gate, up, count, Gated<Silu>());
        case FUNCTION_GELU: return map(out, gate, up, count, Gated<Gelu>());
        case FUNCTION_GELU_TANH: return map(out, gate, up, count, Gated<GeluTanh>());
        case FUNCTION_RELU: return map(out, gate, up, count, Gated<Relu>());
        case FUNCTION_RELU2: return map(out, gate, up, count, Gated<Relu2>());
        case FUNCTION_EXP: return map(out, gate, up, count, Gated<Exp>());
        case FUNCTION_SIGMOID: return map(out, gate, up, count, Gated<Sigmoid>());
        case FUNCTION_CLAMPED_SWIGLU: return map(out, gate, up, count, ClampedSwiglu());
        default: return map(out, gate, up, count, Gated<None>());
    }
}

void add_rows(float* out, const float* a, const float* b, int64_t count) { map(out, a, b, count, Add()); }

void multiply_rows(float* out, const float* a, const float* b, int64_t count) { map(out, a, b, count, Multiply()); }

void scale_rows(float* out, const float* a, float factor, int64_t count) {
    map(out, a, count, Scale{broadcast(factor)});
}

void softcap_rows(float* out, const float* a, float cap, int64_t count) { map(out, a, count, Softcap{broadcast(cap)}); }

void clamp_rows(float* out, const float* a, float low, float high, int64_t count) {
    map(out, a, count, Clamp{broadcast(low), broadcast(high)});
}

void xielu_rows(float* out, const float* a, const float* settings, int64_t count) {
    map(out, a, count, Xielu{broadcast(settings[0]), broadcast(settings[1]), broadcast(settings[2]),
                             broadcast(settings[3])});
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
