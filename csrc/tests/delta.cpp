// Tests the gated delta rule: against the recurrence in float64; that a row's bits do not depend on the steps, on the
// threads or on where its state comes from; and that nothing is accessed out of bounds: blocks and states end at an
// inaccessible page, and what was never written holds NaN.
#include "../delta.h"

#include "../kvasir_cpu.h"
#include "../rows.h"
#include "check.h"

KVASIR_API int32_t kvasir_gated_delta(kvasir::DeltaArgs* args, int32_t threads);

namespace {

using kvasir_test::Guarded;
using kvasir_test::require;
using kvasir_test::same;

constexpr int32_t BLOCK = 16, TOKENS = 53, BLOCKS = 1 + (TOKENS + BLOCK - 1) / BLOCK;

struct Case {
    int32_t qk_heads, v_heads, dim, v_dim, taps, tiled = 0, decays = 1;
    float strength = 1.0f;

    int64_t channels() const { return 2 * int64_t{qk_heads} * dim + int64_t{v_heads} * v_dim; }
};

struct Data {
    std::vector<float> q, k, v, b, a, kernel, rate, bias;
};

Data draw(const Case& c) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const auto make = [&](int64_t count, float size) {
        std::vector<float> found(static_cast<size_t>(count));
        for (float& value : found) value = size * normal(random);
        return found;
    };
    const int64_t wide = int64_t{c.qk_heads} * c.dim;
    return {make(TOKENS * wide, 1.0f), make(TOKENS * wide, 1.0f), make(TOKENS * int64_t{c.v_heads} * c.v_dim, 1.0f),
            make(TOKENS * c.v_heads, 2.0f), make(TOKENS * c.v_heads * c.decays, 4.0f), make(c.taps * c.channels(), 0.5f),
            make(c.v_heads * c.decays, 0.5f), make(c.v_heads * c.decays, 1.0f)};
}

// The channels of one kind of a token, after convolution and silu.
std::vector<double> convolved(const Case& c, const Data& d, const std::vector<float>& from, int64_t width,
                              int64_t channel, int64_t offset, int64_t stride, int64_t token) {
    std::vector<double> found(static_cast<size_t>(width));
    for (int64_t i = 0; i < width; ++i) {
        double sum = 0;
        for (int64_t t = 0; t < c.taps; ++t) {
            const int64_t at = token - (c.taps - 1) + t;
            if (at < 0) continue;
            sum += static_cast<double>(from[static_cast<size_t>(at * stride + offset + i)]) *
                   static_cast<double>(d.kernel[static_cast<size_t>(t * c.channels() + channel + i)]);
        }
        found[static_cast<size_t>(i)] = sum / (1 + std::exp(-sum));
    }
    return found;
}

void normalise(std::vector<double>& x, double factor) {
    double total = 1e-6;
    for (const double value : x) total += value * value;
    for (double& value : x) value *= factor / std::sqrt(total);
}

std::vector<double> expect(const Case& c, const Data& d) {
    std::vector<double> out(static_cast<size_t>(TOKENS * c.v_heads * c.v_dim));
    const int64_t wide = int64_t{c.qk_heads} * c.dim, share = c.v_heads / c.qk_heads;
    for (int64_t h = 0; h < c.v_heads; ++h) {
        std::vector<double> state(static_cast<size_t>(c.dim * c.v_dim));
        for (int64_t t = 0; t < TOKENS; ++t) {
            const int64_t from = (c.tiled ? h % c.qk_heads : h / share) * c.dim;
            std::vector<double> q = convolved(c, d, d.q, c.dim, from, from, wide, t);
            std::vector<double> k = convolved(c, d, d.k, c.dim, wide + from, from, wide, t);
            const std::vector<double> v = convolved(c, d, d.v, c.v_dim, 2 * wide + h * c.v_dim, h * c.v_dim,
                                                    int64_t{c.v_heads} * c.v_dim, t);
            normalise(q, 1 / std::sqrt(static_cast<double>(c.dim)));
            normalise(k, 1);
            const size_t gate = static_cast<size_t>(t * c.v_heads + h);
            const double beta = static_cast<double>(c.strength) / (1 + std::exp(-static_cast<double>(d.b[gate])));
            const auto decay = [&](int64_t i) {
                const size_t at = static_cast<size_t>((t * c.v_heads + h) * c.decays + i % c.decays);
                const size_t own = static_cast<size_t>(h * c.decays + i % c.decays);
                const double step = std::log1p(std::exp(static_cast<double>(d.a[at]) + static_cast<double>(d.bias[own])));
                return std::exp(-std::exp(static_cast<double>(d.rate[own])) * step);
            };
            for (int64_t e = 0; e < c.v_dim; ++e) {
                double known = 0, sum = 0;
                for (int64_t i = 0; i < c.dim; ++i) {
                    double& s = state[static_cast<size_t>(i * c.v_dim + e)];
                    s *= decay(i);
                    known += s * k[static_cast<size_t>(i)];
                }
                for (int64_t i = 0; i < c.dim; ++i) {
                    double& s = state[static_cast<size_t>(i * c.v_dim + e)];
                    s += (v[static_cast<size_t>(e)] - known) * beta * k[static_cast<size_t>(i)];
                    sum += s * q[static_cast<size_t>(i)];
                }
                out[static_cast<size_t>((t * c.v_heads + h) * c.v_dim + e)] = sum;
            }
        }
    }
    return out;
}

// One sequence, in row 1 of the runner.
class Sequence {
  public:
    Sequence(const Case& c, const Data& d)
        : c_(c), d_(d), inputs_(c.channels() + (1 + c.decays) * c.v_heads), state_(int64_t{c.v_heads} * c.dim * c.v_dim),
          stride_(state_ + (c.taps - 1 + BLOCK) * inputs_), blocks(BLOCKS * stride_), states(2 * state_),
          out(TOKENS * int64_t{c.v_heads} * c.v_dim) {
        forget(true);
        for (int64_t i = 0; i < BLOCKS * stride_; ++i) blocks[i] = std::nanf("");
        for (int32_t i = 0; i < BLOCKS; ++i) table_[i] = BLOCKS - 1 - i;
    }

    // Computes the tokens [start, start + count). reached: see Piece.
    void run(int64_t start, int64_t count, int64_t reached, int32_t threads) {
        const int64_t wide = int64_t{c_.qk_heads} * c_.dim, v_wide = int64_t{c_.v_heads} * c_.v_dim;
        const int32_t* tables[1] = {table_};
        kvasir::Piece piece = {1, 0, start, count, 0, tables, reached};
        kvasir::DeltaArgs args = {
            c_.qk_heads, c_.v_heads, c_.tiled, c_.decays, c_.dim, c_.v_dim, c_.taps, kvasir::FUNCTION_SILU, BLOCK, 0,
            c_.strength, 0, blocks.data, stride_, states.data,
            d_.q.data() + start * wide, d_.k.data() + start * wide, d_.v.data() + start * v_wide,
            d_.b.data() + start * c_.v_heads, d_.a.data() + start * c_.v_heads * c_.decays, c_.v_heads, d_.kernel.data(),
            d_.rate.data(), d_.bias.data(), out.data + start * v_wide, &piece, 1,
        };
        require(kvasir_gated_delta(&args, threads) == 0, "the delta rule refuses");
    }

    // Makes the row's own state useless.
    void forget(bool all = false) {
        for (int64_t i = all ? 0 : state_; i < 2 * state_; ++i) states[i] = std::nanf("");
    }

  private:
    const Case& c_;
    const Data& d_;
    const int64_t inputs_, state_, stride_;
    int32_t table_[BLOCKS];

  public:
    Guarded<float> blocks, states, out;
};

void test_case(const Case& c) {
    const Data data = draw(c);
    const std::vector<double> expected = expect(c, data);
    const int64_t count = static_cast<int64_t>(expected.size());
    Sequence whole(c, data);
    whole.run(0, TOKENS, 0, 1);
    double scale = 0;
    for (const double value : expected) scale = std::fmax(scale, std::fabs(value));
    for (int64_t i = 0; i < count; ++i) {
        require(std::fabs(static_cast<double>(whole.out[i]) - expected[static_cast<size_t>(i)]) <= 2e-5 * scale,
                "the delta rule differs from float64");
    }
    Sequence singles(c, data);
    for (int64_t t = 0; t < TOKENS; ++t) singles.run(t, 1, t, 2);
    require(same(whole.out.data, singles.out.data, count), "single tokens have other bits");
    Sequence walks(c, data);  // every step starts from the block
    for (int64_t t = 0, size = 1; t < TOKENS; t += size, size = size % 7 + 1) {
        walks.forget();
        walks.run(t, size < TOKENS - t ? size : TOKENS - t, 0, 3);
    }
    require(same(whole.out.data, walks.out.data, count), "walks from the block's start have other bits");
}

}  // namespace

void test_delta() {
    for (const Case& c : {Case{1, 1, 16, 16, 4}, Case{2, 6, 5, 7, 4}, Case{2, 6, 5, 7, 4, 1}, Case{2, 4, 32, 80, 2},
                          Case{1, 2, 3, 130, 1}, Case{1, 1, 256, 256, 8}, Case{2, 2, 32, 16, 4, 0, 32}, Case{1, 3, 5, 37, 4, 0, 5, 2.0f}, Case{2, 4, 16, 80, 2, 0, 1, 2.0f}}) {
        test_case(c);
    }
}
