// Fuzzes the kernels on rows of several streams, and on whole rows: a row's bits must not depend on the other rows, nor
// on whether it is overwritten.
#include "../dispatch.h"
#include "input.h"

namespace {

using namespace kvasir_fuzz;
using kvasir::FloatMode;
using kvasir::kernels;

struct Rows {
    int64_t rows, streams, cols, active;
    float deviations, least;
    std::vector<float> x, like, predicting, correcting;

    int64_t wide() const { return streams * cols; }
};

// All kernels on the rows [first, last).
std::vector<float> run(const Rows& in, int64_t first, int64_t last, bool in_place) {
    [[maybe_unused]] const FloatMode mode;
    const int64_t count = last - first, size = count * in.wide();
    Guarded<float> x(size), like(size), out(size), predicting(count * in.streams * in.streams);
    Guarded<float> correcting(count * in.streams), one(count * in.cols);
    std::copy_n(in.predicting.begin() + first * in.streams * in.streams, count * in.streams * in.streams, predicting.data);
    std::copy_n(in.correcting.begin() + first * in.streams, count * in.streams, correcting.data);
    std::copy_n(in.like.begin() + first * in.cols, count * in.cols, one.data);
    std::vector<float> found;
    float* const from = in_place ? out.data : x.data;
    const auto begin = [&] {
        std::copy_n(in.x.begin() + first * in.wide(), size, x.data);
        std::copy_n(in.x.begin() + first * in.wide(), size, out.data);
        std::copy_n(in.like.begin() + first * in.wide(), size, like.data);
    };
    const auto keep = [&] { found.insert(found.end(), out.data, out.data + size); };
    begin();
    kernels().predict_streams(out.data, x.data, predicting.data, count, in.streams, in.cols);
    keep();
    begin();
    kernels().correct_streams(out.data, from, one.data, correcting.data, count, in.streams, in.cols, in.active);
    keep();
    begin();
    kernels().gaussian_cut(out.data, from, count, in.wide(), in.deviations);
    keep();
    begin();
    kernels().match(out.data, from, like.data, count, in.wide(), in.least);
    keep();
    if (in_place) {
        begin();
        std::copy_n(like.data, size, out.data);
        kernels().match(out.data, x.data, out.data, count, in.wide(), in.least);
        require(same(out.data, &found[static_cast<size_t>(3 * size)], size), "match: the same bits over `like`");
    }
    return found;
}

void check_rows(const Rows& in, const std::vector<float>& all) {
    const int64_t size = in.rows * in.wide();
    for (int64_t row = 0; row < in.rows; ++row) {
        const std::vector<float> alone = run(in, row, row + 1, true);
        for (int64_t kernel = 0; kernel < 4; ++kernel) {
            require(same(&alone[static_cast<size_t>(kernel * in.wide())],
                         &all[static_cast<size_t>(kernel * size + row * in.wide())], in.wide()),
                    "streams: a row has the same bits alone and in place");
        }
    }
}

}  // namespace

void fuzz_streams(const uint8_t* data, size_t size) {
    Input in(data, size);
    Rows r = {in.between(1, 4), in.between(1, 5), in.between(1, 80), 0, 0, 0, {}, {}, {}, {}};
    r.active = in.between(0, r.streams - 1);
    r.deviations = in.number(true);
    r.least = in.one_of({1e-5f, 0.0f, 1e-45f, 1.0f});
    const auto fill = [&](std::vector<float>& to, int64_t count) {
        to.resize(static_cast<size_t>(count));
        in.floats(to.data(), count);
    };
    fill(r.x, r.rows * r.wide());
    fill(r.like, r.rows * r.wide());
    fill(r.predicting, r.rows * r.streams * r.streams);
    fill(r.correcting, r.rows * r.streams);
    on_all(
        [&] {
            const std::vector<float> found = run(r, 0, r.rows, false);
            check_rows(r, found);
            return found;
        },
        "streams: all instruction sets give the same bits");
}
