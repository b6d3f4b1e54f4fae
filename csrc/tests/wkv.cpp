// Tests RWKV-7: against the recurrence in float64; that a row's bits do not depend on the steps, on the threads or on
// where its state comes from; that bad sizes are refused; and that nothing is accessed out of bounds: blocks and states
// end at an inaccessible page, and what was never written holds NaN.
#include "layers.h"

namespace {

using namespace kvasir_test;

constexpr int64_t TOKENS = 53;

double at(const std::vector<float>& x, int64_t i) { return static_cast<double>(x[static_cast<size_t>(i)]); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// One head, written plainly.
void expect_head(const WkvLayer& d, int64_t head, std::vector<double>& out) {
    const int64_t n = d.s.dim, width = d.width();
    const auto size = static_cast<size_t>(n);
    std::vector<double> state(size * size), removed(size), key(size), result(size);
    for (int64_t t = 0; t < TOKENS; ++t) {
        const int64_t row = t * width + head * n;
        double length = 0, bonus = 0;
        for (int64_t i = 0; i < n; ++i) {
            const double k = at(d.k, row + i), rate = sigmoid(at(d.a, row + i));
            removed[static_cast<size_t>(i)] = k * at(d.k_k, head * n + i);
            key[static_cast<size_t>(i)] = k * (1 + (rate - 1) * at(d.k_a, head * n + i));
            length += removed[static_cast<size_t>(i)] * removed[static_cast<size_t>(i)];
            bonus += at(d.r, row + i) * key[static_cast<size_t>(i)] * at(d.r_k, head * n + i);
        }
        for (double& x : removed) x /= std::fmax(std::sqrt(length), 1e-12);
        double mean = 0, square = 0;
        for (int64_t j = 0; j < n; ++j) {
            double known = 0, sum = 0;
            for (int64_t i = 0; i < n; ++i) known += removed[static_cast<size_t>(i)] * state[static_cast<size_t>(i * n + j)];
            for (int64_t i = 0; i < n; ++i) {
                double& s = state[static_cast<size_t>(i * n + j)];
                const double rate = sigmoid(at(d.a, row + i));
                s = s * std::exp(-std::exp(-0.5) * sigmoid(at(d.w, row + i))) - removed[static_cast<size_t>(i)] * rate * known +
                    key[static_cast<size_t>(i)] * at(d.v, row + j);
                sum += s * at(d.r, row + i);
            }
            result[static_cast<size_t>(j)] = sum;
            mean += sum / static_cast<double>(n);
        }
        for (const double x : result) square += (x - mean) * (x - mean) / static_cast<double>(n);
        for (int64_t j = 0; j < n; ++j) {
            double x = result[static_cast<size_t>(j)];
            if (d.s.normed) {
                x = (x - mean) / std::sqrt(square + static_cast<double>(d.EPS));
                x = x * at(d.weight, head * n + j) + at(d.bias, head * n + j);
            }
            out[static_cast<size_t>(row + j)] = x + bonus * at(d.v, row + j);
        }
    }
}

std::vector<double> expect(const WkvLayer& d) {
    std::vector<double> out(static_cast<size_t>(TOKENS * d.width()));
    for (int64_t head = 0; head < d.s.heads; ++head) expect_head(d, head, out);
    return out;
}

std::vector<double> expect(const ShiftLayer& d) {
    std::vector<double> out;
    for (int64_t t = 0; t < TOKENS; ++t) {
        for (int64_t m = 0; m < d.s.count; ++m) {
            for (int64_t i = 0; i < d.s.width; ++i) {
                const double x = at(d.x, t * d.s.width + i), last = t ? at(d.x, (t - 1) * d.s.width + i) : 0;
                out.push_back(x + (last - x) * at(d.mix, m * d.s.width + i));
            }
        }
    }
    return out;
}

void test_sizes() {
    const auto ones = [](int64_t count, float size) { return std::vector<float>(static_cast<size_t>(count), size); };
    const WkvLayer rule({2, 16, 1, 3}, 1, ones);
    const auto refuses = [&](auto change) {
        kvasir::WkvArgs args = rule.arguments({nullptr, 0, 16, nullptr, nullptr, nullptr, 0, 1});
        change(args);
        require(kvasir_wkv(&args, 1) == -1, "bad sizes are accepted");
    };
    refuses([](kvasir::WkvArgs& a) { a.heads = 0; });
    refuses([](kvasir::WkvArgs& a) { a.heads = 1 << 30; });
    refuses([](kvasir::WkvArgs& a) { a.dim = 257; });
    refuses([](kvasir::WkvArgs& a) { a.rows.taps = 3; });
    refuses([](kvasir::WkvArgs& a) { a.rows.block_size = 1; });
    refuses([](kvasir::WkvArgs& a) { a.rows.inputs = 4 * 32 - 1; });
    refuses([](kvasir::WkvArgs& a) { a.rows.state_size -= 1; });
    refuses([](kvasir::WkvArgs& a) { a.bias = nullptr; });
    const ShiftLayer shift({8, 3, 5}, 1, ones);
    const auto refuses_shift = [&](auto change) {
        kvasir::ShiftArgs args = shift.arguments({nullptr, 0, 16, nullptr, nullptr, nullptr, 0, 1});
        change(args);
        require(kvasir_token_shift(&args, 1) == -1, "bad sizes of a shift are accepted");
    };
    refuses_shift([](kvasir::ShiftArgs& a) { a.count = 7; });
    refuses_shift([](kvasir::ShiftArgs& a) { a.count = 0; });
    refuses_shift([](kvasir::ShiftArgs& a) { a.width = a.rows.inputs + 1; });
    refuses_shift([](kvasir::ShiftArgs& a) { a.rows.block_size = -1; });
}

}  // namespace

void test_wkv() {
    std::mt19937 random(12);
    const Fill fill = [&](int64_t count, float size) { return normals(random, count, size); };
    for (const WkvLayer::Sizes& s : {WkvLayer::Sizes{1, 16, 1, 16}, {3, 64, 1, 192}, {2, 5, 1, 0}, {2, 23, 0, 7},
                                     {1, 80, 1, 80}, {1, 256, 0, 1}}) {
        const WkvLayer layer(s, TOKENS, fill);
        check_steps(layer, expect(layer), 5e-5, "the rule of RWKV-7");
    }
    for (const ShiftLayer::Sizes& s : {ShiftLayer::Sizes{16, 1, 0}, {23, 6, 5}, {70, 2, 64}}) {
        const ShiftLayer layer(s, TOKENS, fill);
        check_steps(layer, expect(layer), 1e-6, "the token shift");
    }
    test_sizes();
}
