// Tests the gated short convolution: against float64; that a token's bits do not depend on the steps or the threads; and
// that nothing is accessed out of bounds: blocks and rows end at an inaccessible page, and what was never written holds
// NaN.
#include "layers.h"

namespace {

using namespace kvasir_test;

constexpr int64_t TOKENS = 53;
using Case = ShortConvLayer::Sizes;

std::vector<double> expect(const ShortConvLayer& d) {
    const int64_t width = d.width(), taps = d.taps();
    const auto at = [](const auto& array, int64_t i) { return static_cast<double>(array[static_cast<size_t>(i)]); };
    std::vector<double> out(static_cast<size_t>(TOKENS * width));
    for (int64_t t = 0; t < TOKENS; ++t) {
        for (int64_t i = 0; i < width; ++i) {
            double sum = d.s.has_bias ? static_cast<double>(d.bias.data[i]) : 0.0;
            for (int64_t tap = 0; tap < taps; ++tap) {
                const int64_t token = t - taps + 1 + tap;
                if (token < 0) continue;
                sum += static_cast<double>(d.kernel.data[tap * width + i]) * at(d.b, token * width + i) *
                       at(d.x, token * width + i);
            }
            out[static_cast<size_t>(t * width + i)] = sum * at(d.c, t * width + i);
        }
    }
    return out;
}

void test_case(const Case& sizes) {
    std::mt19937 random(7);
    const ShortConvLayer layer(sizes, TOKENS, [&](int64_t count, float size) { return normals(random, count, size); });
    check_steps(layer, expect(layer), 2e-6, "the short convolution");
}

void test_sizes_that_it_refuses() {
    for (const Case& c : {Case{0, 3, false}, Case{-1, 3, false}, Case{8, 0, false}, Case{8, 9, false}}) {
        kvasir::ShortConvArgs args = {};
        args.width = c.width, args.taps = c.taps, args.block_size = 16;
        require(kvasir_short_conv(&args, 1) == -1, "the short convolution accepts a bad size");
    }
}

}  // namespace

void test_short_conv() {
    for (const Case& c : {Case{64, 3, false}, Case{37, 3, true}, Case{5, 1, false}, Case{130, 8, true}, Case{16, 2, true}}) {
        test_case(c);
    }
    test_sizes_that_it_refuses();
}
