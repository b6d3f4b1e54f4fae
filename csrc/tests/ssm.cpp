// Tests selective state spaces: against the recurrence in float64; that a row's bits do not depend on the steps, on the
// threads or on where its state comes from; that bad sizes are refused; and that nothing is accessed out of bounds:
// blocks and states end at an inaccessible page, and what was never written holds NaN.
#include "../ssm.h"

#include "../kvasir_cpu.h"
#include "../rows.h"
#include "check.h"

KVASIR_API int32_t kvasir_selective_scan(kvasir::ScanArgs* args, int32_t threads);

namespace {

using kvasir_test::Guarded;
using kvasir_test::require;
using kvasir_test::same;

constexpr int32_t BLOCK = 16, TOKENS = 53, BLOCKS = 1 + (TOKENS + BLOCK - 1) / BLOCK;

struct Case {
    int32_t heads, groups, dim, width, taps, per_channel = 0;
    float low = 0.0f, high = 1e9f;

    int64_t inner() const { return int64_t{heads} * width; }
    int64_t shared() const { return int64_t{groups} * dim; }
    int64_t channels() const { return inner() + (per_channel ? 0 : 2 * shared()); }
    int64_t steps() const { return per_channel ? inner() : heads; }
    int64_t inputs() const { return channels() + steps() + (per_channel ? shared() : 0); }
    int64_t state() const { return inner() * dim; }
};

struct Data {
    std::vector<float> x, kernel, conv_bias, dt, b, c, rates, bias, skip;
};

Data draw(const Case& c) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const auto make = [&](int64_t count, float size) {
        std::vector<float> found(static_cast<size_t>(count));
        for (float& value : found) value = size * normal(random);
        return found;
    };
    Data d = {make(TOKENS * c.channels(), 1.0f), make(c.taps * c.channels(), 0.5f), make(c.channels(), 0.5f),
              make(TOKENS * c.steps(), 2.0f), make(TOKENS * c.shared(), 1.0f), make(TOKENS * c.shared(), 1.0f),
              make(c.per_channel ? c.state() : c.heads, 1.0f), make(c.steps(), 1.0f), make(c.steps(), 1.0f)};
    for (float& rate : d.rates) rate = std::fabs(rate);
    return d;
}

double convolved(const Case& c, const Data& d, int64_t channel, int64_t token) {
    double sum = static_cast<double>(d.conv_bias[static_cast<size_t>(channel)]);
    for (int64_t t = 0; t < c.taps; ++t) {
        const int64_t at = token - (c.taps - 1) + t;
        if (at < 0) continue;
        sum += static_cast<double>(d.x[static_cast<size_t>(at * c.channels() + channel)]) *
               static_cast<double>(d.kernel[static_cast<size_t>(t * c.channels() + channel)]);
    }
    return sum / (1 + std::exp(-sum));
}

std::vector<double> expect(const Case& c, const Data& d) {
    std::vector<double> out(static_cast<size_t>(TOKENS * c.inner()));
    for (int64_t channel = 0; channel < c.inner(); ++channel) {
        const int64_t head = channel / c.width, shared = head / (c.heads / c.groups) * c.dim;
        const int64_t step_at = c.per_channel ? channel : head;
        std::vector<double> state(static_cast<size_t>(c.dim));
        for (int64_t t = 0; t < TOKENS; ++t) {
            const double dt = static_cast<double>(d.dt[static_cast<size_t>(t * c.steps() + step_at)]) +
                              static_cast<double>(d.bias[static_cast<size_t>(step_at)]);
            const double step = std::fmin(std::fmax(std::log1p(std::exp(dt)), static_cast<double>(c.low)),
                                          static_cast<double>(c.high));
            const double x = convolved(c, d, channel, t);
            double sum = x * static_cast<double>(d.skip[static_cast<size_t>(step_at)]);
            for (int64_t n = 0; n < c.dim; ++n) {
                const size_t at = static_cast<size_t>(t * c.shared() + shared + n);
                const double b = c.per_channel ? static_cast<double>(d.b[at]) : convolved(c, d, c.inner() + shared + n, t);
                const double read = c.per_channel ? static_cast<double>(d.c[at])
                                                  : convolved(c, d, c.inner() + c.shared() + shared + n, t);
                const int64_t rate = c.per_channel ? n * c.inner() + channel : head;
                double& s = state[static_cast<size_t>(n)];
                s = s * std::exp(-step * static_cast<double>(d.rates[static_cast<size_t>(rate)])) + step * x * b;
                sum += s * read;
            }
            out[static_cast<size_t>(t * c.inner() + channel)] = sum;
        }
    }
    return out;
}

// One sequence, in row 1 of the runner.
class Sequence {
  public:
    Sequence(const Case& c, const Data& d)
        : c_(c), d_(d), stride_(c.state() + (c.taps - 1 + BLOCK) * c.inputs()), mixed_(TOKENS * c.channels()),
          blocks(BLOCKS * stride_), states(2 * c.state()), out(TOKENS * c.inner()) {
        forget(true);
        for (int64_t i = 0; i < BLOCKS * stride_; ++i) blocks[i] = std::nanf("");
        for (int32_t i = 0; i < BLOCKS; ++i) table_[i] = BLOCKS - 1 - i;
    }

    // Computes the tokens [start, start + count). reached: see Piece.
    void run(int64_t start, int64_t count, int64_t reached, int32_t threads) {
        const int32_t* tables[1] = {table_};
        kvasir::Piece piece = {1, 0, start, count, 0, tables, reached};
        kvasir::ScanArgs args = arguments(start, piece);
        require(kvasir_selective_scan(&args, threads) == 0, "the scan refuses");
    }

    kvasir::ScanArgs arguments(int64_t start, const kvasir::Piece& piece) {
        kvasir::ScanArgs a = {};
        a.conv.rows = {blocks.data, stride_, c_.state(), c_.inputs(), c_.taps, BLOCK, 0, 0};
        a.conv.channels = c_.channels();
        a.conv.function = kvasir::FUNCTION_SILU;
        a.conv.x = d_.x.data() + start * c_.channels();
        a.conv.kernel = d_.kernel.data();
        a.conv.bias = d_.conv_bias.data();
        a.conv.out = mixed_.data;
        a.conv.pieces = &piece;
        a.conv.num_pieces = 1;
        a.heads = c_.heads, a.groups = c_.groups, a.dim = c_.dim, a.width = c_.width, a.per_channel = c_.per_channel;
        a.low = c_.low, a.high = c_.high;
        a.states = states.data;
        a.dt = d_.dt.data() + start * c_.steps();
        a.b = c_.per_channel ? d_.b.data() + start * c_.shared() : a.conv.out + c_.inner();
        a.c = c_.per_channel ? d_.c.data() + start * c_.shared() : a.b + c_.shared();
        a.b_stride = a.c_stride = c_.per_channel ? c_.shared() : c_.channels();
        a.rates = d_.rates.data(), a.bias = d_.bias.data(), a.skip = d_.skip.data();
        a.out = out.data + start * c_.inner();
        return a;
    }

    // Makes the row's own state useless.
    void forget(bool all = false) {
        for (int64_t i = all ? 0 : c_.state(); i < 2 * c_.state(); ++i) states[i] = std::nanf("");
    }

  private:
    const Case& c_;
    const Data& d_;
    const int64_t stride_;
    int32_t table_[BLOCKS];
    Guarded<float> mixed_;

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
                "the scan differs from float64");
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

void test_sizes() {
    const Case c = {2, 1, 16, 16, 4};
    const Data data = draw(c);
    Sequence sequence(c, data);
    const kvasir::Piece piece = {};
    const auto refuses = [&](auto change) {
        kvasir::ScanArgs args = sequence.arguments(0, piece);
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
