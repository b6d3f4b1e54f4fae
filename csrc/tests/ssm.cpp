// Tests selective state spaces: against the recurrence in float64; that a row's bits do not depend on the steps, on the
// threads or on where its state comes from; that bad sizes are refused; and that nothing is accessed out of bounds:
// blocks and states end at an inaccessible page, and what was never written holds NaN.
#include "layers.h"

namespace {

using namespace kvasir_test;

constexpr int64_t TOKENS = 53;
using Case = ScanLayer::Sizes;

double convolved(const ScanLayer& d, int64_t channel, int64_t token) {
    double sum = static_cast<double>(d.conv_bias[static_cast<size_t>(channel)]);
    for (int64_t t = 0; t < d.s.taps; ++t) {
        const int64_t at = token - (d.s.taps - 1) + t;
        if (at < 0) continue;
        sum += static_cast<double>(d.x[static_cast<size_t>(at * d.channels() + channel)]) *
               static_cast<double>(d.kernel[static_cast<size_t>(t * d.channels() + channel)]);
    }
    return sum / (1 + std::exp(-sum));
}

std::vector<double> expect(const ScanLayer& d) {
    const Case& c = d.s;
    std::vector<double> out(static_cast<size_t>(TOKENS * d.width()));
    for (int64_t channel = 0; channel < d.width(); ++channel) {
        const int64_t head = channel / c.width, shared = head / (c.heads / c.groups) * c.dim;
        const int64_t step_at = c.per_channel ? channel : head;
        std::vector<double> state(static_cast<size_t>(c.dim));
        for (int64_t t = 0; t < TOKENS; ++t) {
            const double dt = static_cast<double>(d.dt[static_cast<size_t>(t * d.steps() + step_at)]) +
                              static_cast<double>(d.bias[static_cast<size_t>(step_at)]);
            const double step = std::fmin(std::fmax(std::log1p(std::exp(dt)), static_cast<double>(c.low)),
                                          static_cast<double>(c.high));
            const double x = convolved(d, channel, t);
            double sum = x * static_cast<double>(d.skip[static_cast<size_t>(step_at)]);
            for (int64_t n = 0; n < c.dim; ++n) {
                const size_t at = static_cast<size_t>(t * d.shared() + shared + n);
                const double b = c.per_channel ? static_cast<double>(d.b[at]) : convolved(d, d.width() + shared + n, t);
                const double read = c.per_channel ? static_cast<double>(d.c[at])
                                                  : convolved(d, d.width() + d.shared() + shared + n, t);
                const int64_t rate = c.per_channel ? n * d.width() + channel : head;
                double& s = state[static_cast<size_t>(n)];
                s = s * std::exp(-step * static_cast<double>(d.rates[static_cast<size_t>(rate)])) + step * x * b;
                sum += s * read;
            }
            out[static_cast<size_t>(t * d.width() + channel)] = sum;
        }
    }
    return out;
}

void test_case(const Case& sizes) {
    std::mt19937 random(11);
    const ScanLayer layer(sizes, TOKENS, [&](int64_t count, float size) { return normals(random, count, size); });
    check_steps(layer, expect(layer), 2e-5, "the scan");
}

void test_sizes() {
    const ScanLayer layer({2, 1, 16, 16, 4}, 1, [](int64_t count, float size) {
        return std::vector<float>(static_cast<size_t>(count), size);
    });
    const auto refuses = [&](auto change) {
        kvasir::ScanArgs args = layer.arguments({nullptr, 0, 16, nullptr, nullptr, nullptr, 0, 1});
        change(args);
        require(kvasir_selective_scan(&args, 1) == -1, "bad sizes are accepted");
    };
    refuses([](kvasir::ScanArgs& a) { a.heads = 0; });
    refuses([](kvasir::ScanArgs& a) { a.groups = 3; });
    refuses([](kvasir::ScanArgs& a) { a.dim = 257; });
    refuses([](kvasir::ScanArgs& a) { a.width = 1 << 30; });
    refuses([](kvasir::ScanArgs& a) { a.conv.rows.taps = 9; });
    refuses([](kvasir::ScanArgs& a) { a.conv.rows.inputs -= 1; });
    refuses([](kvasir::ScanArgs& a) { a.conv.channels += 1; });
}

}  // namespace

void test_scan() {
    for (const Case& c : {Case{1, 1, 16, 16, 4}, Case{6, 2, 5, 7, 4}, Case{4, 1, 32, 80, 2, 0, 0.1f, 1.5f},
                          Case{2, 2, 3, 130, 1}, Case{1, 1, 256, 256, 8}, Case{1, 1, 16, 16, 4, 1},
                          Case{3, 1, 5, 23, 4, 1}, Case{2, 1, 16, 70, 3, 1, 0.2f, 2.0f}}) {
        test_case(c);
    }
    test_sizes();
}
