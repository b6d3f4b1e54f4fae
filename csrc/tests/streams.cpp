// Tests the kernels on rows of several streams, and those on whole rows that Gemma 3n has, against the portable ones,
// with odd shapes and hostile values; the arrays end at guard pages.
#include "../dispatch.h"
#include "check.h"

using kvasir::FloatMode;
using kvasir::Kernels;
using kvasir_test::Guarded;
using kvasir_test::require;
using kvasir_test::same;

namespace {

void fill(Guarded<float>& array, int64_t count, std::mt19937& random, bool hostile) {
    const float values[] = {0.0f, -0.0f, 1e-42f, 3e38f, -3e38f, INFINITY, -INFINITY, NAN};
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) array[i] = hostile && random() % 4 == 0 ? values[random() % 8] : normal(random);
}

struct Inputs {
    int64_t rows, streams, cols;
    Guarded<float> x, one, predicting, correcting;

    Inputs(int64_t rows, int64_t streams, int64_t cols, std::mt19937& random, bool hostile)
        : rows(rows), streams(streams), cols(cols), x(rows * streams * cols), one(rows * cols),
          predicting(rows * streams * streams), correcting(rows * streams) {
        fill(x, rows * streams * cols, random, hostile);
        fill(one, rows * cols, random, hostile);
        fill(predicting, rows * streams * streams, random, hostile);
        fill(correcting, rows * streams, random, hostile);
    }
};

// All kernels on rows [first, last); out: four arrays of [rows, streams, cols].
void run(const Kernels& k, float* out, const Inputs& in, int64_t first, int64_t last) {
    const FloatMode mode;
    const int64_t s = in.streams, c = in.cols, size = in.rows * s * c, at = first * s * c, count = last - first;
    k.predict_streams(out + at, in.x.data + at, in.predicting.data + first * s * s, count, s, c);
    k.correct_streams(out + size + at, in.x.data + at, in.one.data + first * c, in.correcting.data + first * s, count, s,
                      c, s - 1);
    k.gaussian_cut(out + 2 * size + at, in.x.data + at, count * s, c, 1.5f);
    for (int64_t i = 0; i < s; ++i) {  // rows i of each stream would not be dense: one row at a time
        for (int64_t row = first; row < last; ++row) {
            const int64_t to = (row * s + i) * c;
            k.match(out + 3 * size + to, in.x.data + to, in.one.data + row * c, 1, c, 1e-5f);
        }
    }
}

void check(std::mt19937& random, int64_t streams, int64_t cols, bool hostile) {
    constexpr int64_t ROWS = 3;
    const Inputs in(ROWS, streams, cols, random, hostile);
    const int64_t size = 4 * ROWS * streams * cols;
    Guarded<float> expected(size), out(size);
    run(kvasir::portable::kernels, expected.data, in, 0, ROWS);
    run(kvasir::kernels(), out.data, in, 0, ROWS);
    require(same(out.data, expected.data, size), "kernels on streams equal the portable ones");
    for (int64_t row = 0; row < ROWS; ++row) run(kvasir::kernels(), out.data, in, row, row + 1);
    require(same(out.data, expected.data, size), "a row's bits do not depend on other rows");
}

}  // namespace

void test_streams() {
    std::mt19937 random(1);
    for (int64_t streams : {1, 2, 4}) {
        for (int64_t cols : {1, 2, 7, 15, 16, 17, 33, 100, 1023}) {
            check(random, streams, cols, false);
            check(random, streams, cols, true);
        }
    }
}
