// Tests the gated delta rule: against the recurrence in float64; that a row's bits do not depend on the steps, on the
// threads or on where its state comes from; and that nothing is accessed out of bounds: blocks and states end at an
// inaccessible page, and what was never written holds NaN.
#include "layers.h"

namespace {

using namespace kvasir_test;

constexpr int64_t TOKENS = 53;
using Case = DeltaLayer::Sizes;

// The channels of one kind of a token, after convolution and silu.
std::vector<double> convolved(const DeltaLayer& d, const std::vector<float>& from, int64_t width,
                              int64_t channel, int64_t offset, int64_t stride, int64_t token) {
    std::vector<double> found(static_cast<size_t>(width));
    for (int64_t i = 0; i < width; ++i) {
        double sum = 0;
        for (int64_t t = 0; t < d.s.taps; ++t) {
            const int64_t at = token - (d.s.taps - 1) + t;
            if (at < 0) continue;
            sum += static_cast<double>(from[static_cast<size_t>(at * stride + offset + i)]) *
                   static_cast<double>(d.kernel[static_cast<size_t>(t * d.channels() + channel + i)]);
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

std::vector<double> expect(const DeltaLayer& d) {
    const Case& c = d.s;
    std::vector<double> out(static_cast<size_t>(TOKENS * c.v_heads * c.v_dim));
    const int64_t wide = int64_t{c.qk_heads} * c.dim, share = c.v_heads / c.qk_heads;
    for (int64_t h = 0; h < c.v_heads; ++h) {
        std::vector<double> state(static_cast<size_t>(c.dim * c.v_dim));
        for (int64_t t = 0; t < TOKENS; ++t) {
            const int64_t from = (c.tiled ? h % c.qk_heads : h / share) * c.dim;
            std::vector<double> q = convolved(d, d.q, c.dim, from, from, wide, t);
            std::vector<double> k = convolved(d, d.k, c.dim, wide + from, from, wide, t);
            const std::vector<double> v = convolved(d, d.v, c.v_dim, 2 * wide + h * c.v_dim, h * c.v_dim,
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

void test_case(const Case& sizes) {
    std::mt19937 random(11);
    const DeltaLayer layer(sizes, TOKENS, [&](int64_t count, float size) { return normals(random, count, size); });
    check_steps(layer, expect(layer), 2e-5, "the delta rule");
}

}  // namespace

void test_delta() {
    for (const Case& c : {Case{1, 1, 16, 16, 4}, Case{2, 6, 5, 7, 4}, Case{2, 6, 5, 7, 4, 1}, Case{2, 4, 32, 80, 2},
                          Case{1, 2, 3, 130, 1}, Case{1, 1, 256, 256, 8}, Case{2, 2, 32, 16, 4, 0, 32},
                          Case{1, 3, 5, 37, 4, 0, 5, 2.0f}, Case{2, 4, 16, 80, 2, 0, 1, 2.0f}}) {
        test_case(c);
    }
}
