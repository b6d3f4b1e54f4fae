// Tests the gated short convolution: against float64; that a token's bits do not depend on the steps or the threads; and
// that nothing is accessed out of bounds: blocks and rows end at an inaccessible page, and what was never written holds
// NaN.
#include "../short_conv.h"

#include "../kvasir_cpu.h"
#include "check.h"

KVASIR_API int32_t kvasir_short_conv(kvasir::ShortConvArgs* args, int32_t threads);

namespace {

using kvasir_test::Guarded;
using kvasir_test::require;
using kvasir_test::same;

constexpr int32_t BLOCK = 16, TOKENS = 53, BLOCKS = 1 + (TOKENS + BLOCK - 1) / BLOCK;

struct Case {
    int32_t width, taps;
    bool has_bias;
};

struct Data {
    explicit Data(const Case& c)
        : b(TOKENS * int64_t{c.width}), c(TOKENS * int64_t{c.width}), x(TOKENS * int64_t{c.width}),
          kernel(c.taps * int64_t{c.width}), bias(c.width) {
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        for (auto& [array, count] : {std::pair<float*, int64_t>{b.data, TOKENS * int64_t{c.width}},
                                     {this->c.data, TOKENS * int64_t{c.width}}, {x.data, TOKENS * int64_t{c.width}},
                                     {kernel.data, c.taps * int64_t{c.width}}, {bias.data, c.width}}) {
            for (int64_t i = 0; i < count; ++i) array[i] = normal(random);
        }
    }

    Guarded<float> b, c, x, kernel, bias;
};

void require_float64(const Case& c, Data& d, Guarded<float>& out) {
    const auto at = [&](Guarded<float>& array, int64_t i) { return static_cast<double>(array[i]); };
    for (int64_t t = 0; t < TOKENS; ++t) {
        for (int64_t i = 0; i < c.width; ++i) {
            double sum = c.has_bias ? at(d.bias, i) : 0.0;
            for (int64_t tap = 0; tap < c.taps; ++tap) {
                const int64_t token = t - c.taps + 1 + tap;
                if (token < 0) continue;
                sum += at(d.kernel, tap * c.width + i) * at(d.b, token * c.width + i) * at(d.x, token * c.width + i);
            }
            const double expected = sum * at(d.c, t * c.width + i);
            require(std::fabs(at(out, t * c.width + i) - expected) <= 1e-5 * (1.0 + std::fabs(expected)),
                    "the short convolution differs from float64");
        }
    }
}

// One sequence in scattered blocks.
class Sequence {
  public:
    Sequence(const Case& c, Data& d)
        : c_(c), d_(d), stride_((c.taps - 1 + BLOCK) * int64_t{c.width}), blocks(BLOCKS * stride_),
          out(TOKENS * int64_t{c.width}) {
        for (int64_t i = 0; i < BLOCKS * stride_; ++i) blocks[i] = std::nanf("");
        for (int32_t i = 0; i < BLOCKS; ++i) table_[i] = BLOCKS - 1 - i;
    }

    // Computes the tokens [start, start + count).
    void run(int64_t start, int64_t count, int32_t threads) {
        const int64_t first = start * c_.width;
        const int32_t* tables[1] = {table_};
        kvasir::Piece piece = {0, 0, start, count, 0, tables, 0};
        kvasir::ShortConvArgs args = {
            c_.width, c_.taps, BLOCK, 0, blocks.data, stride_, d_.b.data + first, d_.c.data + first, d_.x.data + first,
            d_.kernel.data, c_.has_bias ? d_.bias.data : nullptr, out.data + first, &piece, 1,
        };
        require(kvasir_short_conv(&args, threads) == 0, "the short convolution refuses");
    }

  private:
    const Case& c_;
    Data& d_;
    const int64_t stride_;
    int32_t table_[BLOCKS];

  public:
    Guarded<float> blocks, out;
};

void test_case(const Case& c) {
    Data data(c);
    Sequence whole(c, data);
    whole.run(0, TOKENS, 1);
    require_float64(c, data, whole.out);
    Sequence pieces(c, data);
    for (int64_t t = 0, size = 1; t < TOKENS; t += size, size = size % 7 + 1) {
        pieces.run(t, size < TOKENS - t ? size : TOKENS - t, 1 + static_cast<int32_t>(t % 3));
    }
    require(same(whole.out.data, pieces.out.data, TOKENS * int64_t{c.width}), "pieces have other bits");
}

void test_sizes_that_it_refuses() {
    for (const Case& c : {Case{0, 3, false}, Case{-1, 3, false}, Case{8, 0, false}, Case{8, 9, false}}) {
        kvasir::ShortConvArgs args = {};
        args.width = c.width, args.taps = c.taps, args.block_size = BLOCK;
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
