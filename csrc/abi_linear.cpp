// The C ABI of packed matrices and their products. Matrix is the struct of matrix.h; the caller owns it and all arrays.
// Prepared rows and a matrix's data are aligned to 64 bytes.
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pack.h"

namespace kvasir {
namespace {

// Whether the format and the sizes are valid; arithmetic on valid sizes cannot overflow.
bool is_sound(const Matrix& m) {
    constexpr int64_t limit = int64_t{1} << 32;
    if (m.format < 0 || m.format >= FORMAT_COUNT) return false;
    if (m.rows < 1 || m.rows > limit || m.cols < 1 || m.cols > limit) return false;
    if (m.rows > (int64_t{1} << 40) / m.cols) return false;
    if (m.segments != 1 && m.segments != 2 && m.segments != 4 && m.segments != 8) return false;
    return m.cols % m.segments == 0;
}

}  // namespace
}  // namespace kvasir

using kvasir::FloatMode;
using kvasir::Matrix;
using kvasir::kernels;

// The packed format (matrix.h) that holds the values of a GGML type bit for bit, -1 if there is none.
KVASIR_API int32_t kvasir_format_of(int32_t ggml_type) { return kvasir::format_of(ggml_type); }

// Bytes of a packed matrix. -1 if the arguments are invalid: `segments` must be 1, 2, 4 or 8 and divide cols.
KVASIR_API int64_t kvasir_matrix_bytes(int32_t format, int64_t rows, int64_t cols, int32_t segments) {
    const Matrix m = {format, kvasir::ACT_F32, segments, 0, rows, cols, nullptr};
    return kvasir::is_sound(m) ? kvasir::panels(m) * kvasir::panel_bytes(m) : -1;
}

// Bytes of one row converted to a matrix's activations, a multiple of 64. -1 as above.
KVASIR_API int64_t kvasir_activated_bytes(int32_t format, int32_t activation, int64_t cols, int32_t segments) {
    const Matrix m = {format, activation, segments, 0, 1, cols, nullptr};
    return kvasir::is_sound(m) ? kvasir::activated_bytes(m) : -1;
}

// Packs the rows [first_row, first_row + num_rows) of a file into m->data. The file holds blocks of GGML type `source`
// with a row stride of row_bytes; no alignment is needed. first_row must be a multiple of 16, and so must num_rows
// unless the range ends at the last row. Calls for different panels may run concurrently. Returns 0, or -1 and writes
// nothing if the range is invalid or `source` cannot be converted to m's format. An empty range only checks the
// conversion.
KVASIR_API int32_t kvasir_pack(const Matrix* m, int32_t source, const uint8_t* rows, int64_t row_bytes,
                               int64_t first_row, int64_t num_rows) {
    if (!kvasir::is_sound(*m) || first_row < 0 || num_rows < 0 || first_row > m->rows - num_rows) return -1;
    if (first_row % kvasir::PANEL != 0) return -1;
    if (num_rows % kvasir::PANEL != 0 && first_row + num_rows != m->rows) return -1;
    const FloatMode mode;
    return kvasir::pack(*m, source, rows, row_bytes, first_row, num_rows);
}

// Converts float32 rows x [rows, m->cols], row stride x_stride elements, to activations: `out` is [rows] of
// kvasir_activated_bytes each.
KVASIR_API void kvasir_prepare(const Matrix* m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows) {
    const FloatMode mode;
    kernels().prepare(*m, out, x, x_stride, rows);
}

// out[r][n] = residual[r][n] + (bias[n] + sum over k of activated[r][k] * m[n][k]), for all r and all n of the panels
// [first_panel, last_panel), 16 columns each. out and residual: float32 [rows, m->rows] with strides in elements; bias:
// float32 [m->rows]. bias and residual may be null; residual may be out. Each segment (matrix.h) is summed in ascending
// k; a balanced tree adds the segments. Runs on the calling thread.
KVASIR_API void kvasir_linear(const Matrix* m, const uint8_t* activated, int64_t rows, int64_t first_panel,
                              int64_t last_panel, float* out, int64_t out_stride, const float* bias,
                              const float* residual, int64_t residual_stride) {
    const FloatMode mode;
    kernels().linear(*m, activated, rows, first_panel, last_panel, out, out_stride, bias, residual, residual_stride);
}

// Writes the rows `ids` [count] of a matrix to out, float32 [count, m->cols] with row stride out_stride elements. ids
// must be in [0, m->rows).
KVASIR_API void kvasir_lookup(const Matrix* m, float* out, int64_t out_stride, const int64_t* ids, int64_t count) {
    const FloatMode mode;
    kernels().lookup(*m, out, out_stride, ids, count);
}

// The sums of squares of the rows [first, last) of scale * m + b a, in runs of m->cols / segments columns: out, float64
// [rows, segments]. a: float32 [rank, m->cols], b: float32 [m->rows, rank]. room: float32 [m->cols]. Returns 0, or -1
// and writes nothing if the range or the segments are invalid. Runs on the calling thread.
KVASIR_API int32_t kvasir_change_squares(const Matrix* m, float scale, const float* a, const float* b, int64_t rank,
                                         int32_t segments, int64_t first, int64_t last, double* out, float* room) {
    if (!kvasir::is_sound(*m) || rank < 0 || segments < 1 || m->cols % segments) return -1;
    if (first < 0 || first > last || last > m->rows) return -1;
    const FloatMode mode;
    for (int64_t row = first; row < last; ++row, out += segments) {
        kernels().lookup(*m, room, m->cols, &row, 1);
        kernels().squares({room, a, b + row * rank, m->cols, rank, segments, scale}, out);
    }
    return 0;
}
