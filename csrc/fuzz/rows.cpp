// Fuzzes the row kernels: arbitrary numbers, in place and not, strided and dense.
#include "../dispatch.h"
#include "../rows.h"
#include "input.h"

namespace {

using namespace kvasir_fuzz;
using kvasir::FloatMode;
using kvasir::kernels;

// Runs all kernels over [rows, cols] and concatenates their results.
std::vector<float> run(const std::vector<float>& a, const std::vector<float>& b, int64_t rows, int64_t cols,
                       int64_t stride, float eps, float cap, int64_t half) {
    [[maybe_unused]] const FloatMode mode;
    const int64_t size = (rows - 1) * stride + cols;
    std::vector<float> found;
    Guarded<float> out(size), x(size), y(size);
    const auto keep = [&] {
        for (int64_t r = 0; r < rows; ++r) {
            found.insert(found.end(), out.data + r * stride, out.data + r * stride + cols);
        }
    };
    std::copy_n(a.begin(), size, x.data);
    std::copy_n(b.begin(), size, y.data);
    std::copy_n(a.begin(), size, out.data);
    kernels().rms_norm(out.data, stride, out.data, stride, y.data, rows, cols, eps);
    keep();
    kernels().rms_norm(out.data, stride, x.data, stride, y.data, rows, cols, eps);
    require(same(found.data(), out.data, cols), "rms_norm: the same bits in place");
    kernels().layer_norm(out.data, stride, x.data, stride, y.data, x.data, rows, cols, eps);
    keep();
    if (half > 0) {
        kernels().rope(out.data, stride, x.data, stride, y.data, x.data, stride, rows, 1, cols, half);
        keep();
    }
    for (int32_t f = kvasir::FUNCTION_NONE - 1; f <= kvasir::FUNCTION_RELU2 + 1; ++f) {
        kernels().activate(f, out.data, x.data, size);
        keep();
        kernels().gated(f, out.data, x.data, y.data, size);
        keep();
    }
    kernels().add(out.data, x.data, y.data, size);
    keep();
    kernels().multiply(out.data, x.data, y.data, size);
    keep();
    kernels().scale(out.data, x.data, cap, size);
    keep();
    kernels().softcap(out.data, x.data, cap, size);
    keep();
    kernels().clamp(out.data, x.data, -cap, cap, size);
    keep();
    const float settings[] = {cap, eps, 0.5f, -eps};
    kernels().xielu(out.data, x.data, settings, size);
    keep();
    return found;
}

}  // namespace

void fuzz_rows(const uint8_t* data, size_t size) {
    Input in(data, size);
    const int64_t rows = in.between(1, 4), cols = in.between(1, 90), stride = cols + in.between(0, 3);
    const int64_t half = in.between(0, cols / 2);
    const float eps = in.one_of({1e-6f, 0.0f, 1e-45f, 1.0f}), cap = in.one_of({30.0f, 1e-30f, 1e30f, 0.3f});
    std::vector<float> a(static_cast<size_t>(rows * stride)), b(a.size());
    in.floats(a.data(), rows * stride);
    in.floats(b.data(), rows * stride);
    on_all([&] { return run(a, b, rows, cols, stride, eps, cap, half); },
           "rows: all instruction sets give the same bits");
}
