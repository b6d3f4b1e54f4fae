// Dispatches products with packed matrices to the float or the integer kernels.
#include "linear.h"

#include "input_rule.h"
#include "linear_slabs.h"
#include "outliers.h"

namespace kvasir {
namespace KVASIR_ISA {

// Many rows are multiplied in parts, each with all panels, so that its activations stay in the second cache: the number
// of parts. stride: bytes of a row's activations.
static int64_t row_parts(int64_t rows, int64_t stride) {
    constexpr int64_t NEAR = 1 << 18, LEAST = 32;
    const int64_t most = NEAR / stride > LEAST ? NEAR / stride : LEAST;
    return (rows + most - 1) / most;
}

static bool is_float(const Matrix& m) { return m.format < FORMAT_Q4_0; }

void prepare(const Matrix& m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows) {
    (is_float(m) ? prepare_float : prepare_int)(m, out, x, x_stride, rows);
    const InputRule* rule = input_rule(m);
    if (rule && rule->rounding == ROUND_FP8) round_fp8(m, *rule, out, rows);
}

void linear(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
            float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride) {
    const int64_t stride = activated_bytes(m), parts = row_parts(rows, stride);
    for (int64_t p = 0; p < parts; ++p) {
        const int64_t begin = rows * p / parts, count = rows * (p + 1) / parts - begin;
        const auto product = is_float(m) ? linear_float : in_slabs(m, count) ? linear_slabs : linear_int;
        product(m, activated + begin * stride, count, first_panel, last_panel, out + begin * out_stride, out_stride, bias,
                residual ? residual + begin * residual_stride : nullptr, residual_stride);
    }
    if (m.activation & ACT_OUTLIERS) add_outliers(m, activated, rows, first_panel, last_panel, out, out_stride);
}

void lookup_rows(const Matrix& m, float* out, int64_t out_stride, const int64_t* ids, int64_t count) {
    (is_float(m) ? lookup_float : lookup_int)(m, out, out_stride, ids, count);
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
