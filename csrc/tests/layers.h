// The recurrent kernels as layers (recurrent.h) with inputs and weights of their own.
#pragma once

#include <functional>

#include "../delta.h"
#include "../kvasir_cpu.h"
#include "../rows.h"
#include "../short_conv.h"
#include "../ssm.h"
#include "../wkv.h"
#include "recurrent.h"

KVASIR_API int32_t kvasir_gated_delta(kvasir::DeltaArgs* args, int32_t threads);
KVASIR_API int32_t kvasir_selective_scan(kvasir::ScanArgs* args, int32_t threads);
KVASIR_API int32_t kvasir_short_conv(kvasir::ShortConvArgs* args, int32_t threads);
KVASIR_API int32_t kvasir_token_shift(kvasir::ShiftArgs* args, int32_t threads);
KVASIR_API int32_t kvasir_wkv(kvasir::WkvArgs* args, int32_t threads);

namespace kvasir_test {

// Numbers of about that size.
using Fill = std::function<std::vector<float>(int64_t count, float size)>;

class DeltaLayer : public Layer {
  public:
    struct Sizes {
        int32_t qk_heads, v_heads, dim, v_dim, taps, tiled = 0, decays = 1;
        float strength = 1.0f;
    };
    DeltaLayer(const Sizes& sizes, int64_t tokens, const Fill& fill)
        : s(sizes), q(fill(tokens * qk_width(), 1.0f)), k(fill(tokens * qk_width(), 1.0f)),
          v(fill(tokens * width(), 1.0f)), b(fill(tokens * s.v_heads, 2.0f)),
          a(fill(tokens * s.v_heads * s.decays, 4.0f)), kernel(fill(s.taps * channels(), 0.5f)),
          rate(fill(s.v_heads * s.decays, 0.5f)), bias(fill(s.v_heads * s.decays, 1.0f)) {}

    int64_t qk_width() const { return int64_t{s.qk_heads} * s.dim; }
    int64_t channels() const { return 2 * qk_width() + width(); }
    int64_t width() const override { return int64_t{s.v_heads} * s.v_dim; }
    int64_t state() const override { return width() * s.dim; }
    int64_t inputs() const override { return channels() + (1 + s.decays) * s.v_heads; }
    int64_t taps() const override { return s.taps; }

    int32_t run(const Step& step, const std::vector<int64_t>& tokens) const override {
        Chosen own_q(q, qk_width(), tokens), own_k(k, qk_width(), tokens), own_v(v, width(), tokens);
        Chosen own_b(b, s.v_heads, tokens), own_a(a, s.v_heads * s.decays, tokens);
        kvasir::DeltaArgs args = {
            s.qk_heads, s.v_heads, s.tiled, s.decays, s.dim, s.v_dim, s.taps, kvasir::FUNCTION_SILU, step.block_size, 0,
            s.strength, 0, step.blocks, step.block_stride, step.states, own_q.data(), own_k.data(), own_v.data(),
            own_b.data(), own_a.data(), s.v_heads, kernel.data(), rate.data(), bias.data(), step.out, step.pieces,
            step.num_pieces,
        };
        return kvasir_gated_delta(&args, step.threads);
    }

    const Sizes s;
    const std::vector<float> q, k, v, b, a, kernel, rate, bias;
};

class ScanLayer : public Layer {
  public:
    struct Sizes {
        int32_t heads, groups, dim, width, taps, per_channel = 0;
        float low = 0.0f, high = 1e9f;
    };
    ScanLayer(const Sizes& sizes, int64_t tokens, const Fill& fill)
        : s(sizes), x(fill(tokens * channels(), 1.0f)), kernel(fill(s.taps * channels(), 0.5f)),
          conv_bias(fill(channels(), 0.5f)), dt(fill(tokens * steps(), 2.0f)), b(fill(tokens * shared(), 1.0f)),
          c(fill(tokens * shared(), 1.0f)), rates(positive(fill(s.per_channel ? state() : s.heads, 1.0f))),
          bias(fill(steps(), 1.0f)), skip(fill(steps(), 1.0f)) {}

    int64_t shared() const { return int64_t{s.groups} * s.dim; }
    int64_t channels() const { return width() + (s.per_channel ? 0 : 2 * shared()); }
    int64_t steps() const { return s.per_channel ? width() : s.heads; }
    int64_t width() const override { return int64_t{s.heads} * s.width; }
    int64_t state() const override { return width() * s.dim; }
    int64_t inputs() const override { return channels() + steps() + (s.per_channel ? shared() : 0); }
    int64_t taps() const override { return s.taps; }

    int32_t run(const Step& step, const std::vector<int64_t>& tokens) const override {
        Chosen own_x(x, channels(), tokens), own_dt(dt, steps(), tokens);
        Chosen own_b(b, shared(), tokens), own_c(c, shared(), tokens);
        Guarded<float> mixed(static_cast<int64_t>(tokens.size()) * channels());
        kvasir::ScanArgs args = arguments(step);
        args.conv.x = own_x.data();
        args.conv.out = mixed.data;
        args.dt = own_dt.data();
        args.b = s.per_channel ? own_b.data() : mixed.data + width();
        args.c = s.per_channel ? own_c.data() : args.b + shared();
        return kvasir_selective_scan(&args, step.threads);
    }

    // All but what depends on the step's tokens.
    kvasir::ScanArgs arguments(const Step& step) const {
        kvasir::ScanArgs a = {};
        a.conv.rows = {step.blocks, step.block_stride, state(), inputs(), s.taps, step.block_size, 0, 0};
        a.conv.channels = channels();
        a.conv.function = kvasir::FUNCTION_SILU;
        a.conv.kernel = kernel.data(), a.conv.bias = conv_bias.data();
        a.conv.pieces = step.pieces, a.conv.num_pieces = step.num_pieces;
        a.heads = s.heads, a.groups = s.groups, a.dim = s.dim, a.width = s.width, a.per_channel = s.per_channel;
        a.low = s.low, a.high = s.high;
        a.states = step.states;
        a.b_stride = a.c_stride = s.per_channel ? shared() : channels();
        a.rates = rates.data(), a.bias = bias.data(), a.skip = skip.data();
        a.out = step.out;
        return a;
    }

    const Sizes s;
    const std::vector<float> x, kernel, conv_bias, dt, b, c, rates, bias, skip;

  private:
    static std::vector<float> positive(std::vector<float> rates) {
        for (float& rate : rates) rate = std::fabs(rate);
        return rates;
    }
};

class ShortConvLayer : public Layer {
  public:
    struct Sizes {
        int32_t width, taps;
        bool has_bias;
    };
    ShortConvLayer(const Sizes& sizes, int64_t tokens, const Fill& fill)
        : s(sizes), b(fill(tokens * s.width, 1.0f)), c(fill(tokens * s.width, 1.0f)), x(fill(tokens * s.width, 1.0f)),
          kernel(s.taps * int64_t{s.width}), bias(s.width) {
        const std::vector<float> weights = fill(s.taps * int64_t{s.width}, 1.0f), biases = fill(s.width, 1.0f);
        std::copy(weights.begin(), weights.end(), kernel.data);
        std::copy(biases.begin(), biases.end(), bias.data);
    }

    int64_t width() const override { return s.width; }
    int64_t state() const override { return 0; }
    int64_t inputs() const override { return s.width; }
    int64_t taps() const override { return s.taps; }

    int32_t run(const Step& step, const std::vector<int64_t>& tokens) const override {
        Chosen own_b(b, s.width, tokens), own_c(c, s.width, tokens), own_x(x, s.width, tokens);
        kvasir::ShortConvArgs args = {
            s.width, s.taps, step.block_size, 0, step.blocks, step.block_stride, own_b.data(), own_c.data(),
            own_x.data(), kernel.data, s.has_bias ? bias.data : nullptr, step.out, step.pieces, step.num_pieces,
        };
        return kvasir_short_conv(&args, step.threads);
    }

    const Sizes s;
    const std::vector<float> b, c, x;
    Guarded<float> kernel, bias;
};

// The rule of RWKV-7, in rows that begin with `first` floats of something else.
class WkvLayer : public Layer {
  public:
    static constexpr float EPS = 1e-3f;
    struct Sizes {
        int32_t heads, dim, normed;
        int64_t first;
    };
    WkvLayer(const Sizes& sizes, int64_t tokens, const Fill& fill)
        : s(sizes), r(fill(tokens * width(), 1.0f)), w(fill(tokens * width(), 3.0f)), k(fill(tokens * width(), 1.0f)),
          v(fill(tokens * width(), 1.0f)), a(fill(tokens * width(), 2.0f)), k_k(fill(width(), 1.0f)),
          k_a(fill(width(), 1.0f)), r_k(fill(width(), 0.5f)), weight(fill(width(), 1.0f)), bias(fill(width(), 1.0f)) {}

    int64_t width() const override { return int64_t{s.heads} * s.dim; }
    int64_t state() const override { return width() * s.dim; }
    int64_t inputs() const override { return s.first + 4 * width(); }
    int64_t taps() const override { return 2; }

    int32_t run(const Step& step, const std::vector<int64_t>& tokens) const override {
        Chosen own_r(r, width(), tokens), own_w(w, width(), tokens), own_k(k, width(), tokens);
        Chosen own_v(v, width(), tokens), own_a(a, width(), tokens);
        kvasir::WkvArgs args = arguments(step);
        args.r = own_r.data(), args.w = own_w.data(), args.k = own_k.data();
        args.v = own_v.data(), args.a = own_a.data();
        return kvasir_wkv(&args, step.threads);
    }

    // All but what depends on the step's tokens.
    kvasir::WkvArgs arguments(const Step& step) const {
        kvasir::WkvArgs args = {};
        args.rows = {step.blocks, step.block_stride, state(), inputs(), 2, step.block_size, 0, 0};
        args.heads = s.heads, args.dim = s.dim, args.eps = EPS;
        args.states = step.states;
        args.k_k = k_k.data(), args.k_a = k_a.data(), args.r_k = r_k.data();
        if (s.normed) args.weight = weight.data(), args.bias = bias.data();
        args.out = step.out, args.pieces = step.pieces, args.num_pieces = step.num_pieces;
        return args;
    }

    const Sizes s;
    const std::vector<float> r, w, k, v, a, k_k, k_a, r_k, weight, bias;
};

// The token shift of RWKV-7, in rows that end with `rest` floats of something else. A token's result: all mixes.
class ShiftLayer : public Layer {
  public:
    struct Sizes {
        int64_t width;
        int32_t count;
        int64_t rest;
    };
    ShiftLayer(const Sizes& sizes, int64_t tokens, const Fill& fill)
        : s(sizes), x(fill(tokens * s.width, 1.0f)), mix(fill(s.count * s.width, 1.0f)) {}

    int64_t width() const override { return s.width * s.count; }
    int64_t state() const override { return 0; }
    int64_t inputs() const override { return s.width + s.rest; }
    int64_t taps() const override { return 2; }

    int32_t run(const Step& step, const std::vector<int64_t>& tokens) const override {
        const auto count = static_cast<int64_t>(tokens.size());
        Chosen own(x, s.width, tokens);
        Guarded<float> mixed(count * width());
        kvasir::ShiftArgs args = arguments(step);
        args.x = own.data();
        for (int32_t m = 0; m < s.count; ++m) args.out[m] = mixed.data + m * count * s.width;
        const int32_t result = kvasir_token_shift(&args, step.threads);
        for (int64_t t = 0; t < count; ++t) {
            for (int32_t m = 0; m < s.count; ++m) {
                std::copy_n(args.out[m] + t * s.width, s.width, step.out + (t * s.count + m) * s.width);
            }
        }
        return result;
    }

    kvasir::ShiftArgs arguments(const Step& step) const {
        kvasir::ShiftArgs args = {};
        args.rows = {step.blocks, step.block_stride, 0, inputs(), 2, step.block_size, 0, 0};
        args.width = s.width, args.count = s.count, args.mix = mix.data();
        args.pieces = step.pieces, args.num_pieces = step.num_pieces;
        return args;
    }

    const Sizes s;
    const std::vector<float> x, mix;
};

}  // namespace kvasir_test
