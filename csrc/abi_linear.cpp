// The C ABI of packed matrices and their products. A Matrix crosses as the struct of matrix.h; it and all arrays belong
// to the caller. Prepared rows and a matrix's data start at multiples of 64 bytes.
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pack.h"

namespace kvasir {
namespace {

// Whether the sizes make sense at all: the caller's arithmetic on them cannot overflow then.
bool is_sound(const Matrix& m) {
    constexpr int64_t most = int64_t{1} << 32;
    if (m.format < 0 || m.format >= FORMAT_COUNT) return false;
    if (m.rows < 1 || m.rows > most || m.cols < 1 || m.cols > most) return false;
    if (m.rows > (int64_t{1} << 40) / m.cols) return false;
    if (m.segments != 1 && m.segments != 2 && m.segments != 4 && m.segments != 8) return false;
    return m.cols % m.segments == 0;
}

}  // namespace
}  // namespace kvasir

using kvasir::FloatMode;
using kvasir::Matrix;
using kvasir::kernels;

// The packed format (matrix.h) that holds the values of a GGML type bit for bit, -1 where there is none.
KVASIR_API int32_t kvasir_format_of(int32_t ggml_type) { return kvasir::format_of(ggml_type); }

// Bytes of a packed matrix, -1 where there is no such: `segments` is 1, 2, 4 or 8 and divides cols.
KVASIR_API int64_t kvasir_matrix_bytes(int32_t format, int64_t rows, int64_t cols, int32_t segments) {
    const Matrix m = {format, kvasir::ACT_F32, segments, 0, rows, cols, nullptr};
    return kvasir::is_sound(m) ? kvasir::panels(m) * kvasir::panel_bytes(m) : -1;
}

// Bytes of one row turned into activations for such a matrix, a multiple of 64; -1 as above.
KVASIR_API int64_t kvasir_activated_bytes(int32_t format, int32_t activation, int64_t cols, int32_t segments) {
    const Matrix m = {format, activation, segments, 0, 1, cols, nullptr};
    return kvasir::is_sound(m) ? kvasir::activated_bytes(m) : -1;
}

// Packs rows [first_row, first_row + num_rows) of a file, blocks of GGML type `source`, each row_bytes after the one
// before (no alignment needed), into m->data. first_row is a multiple of 16; num_rows is one too, or the rows end the
// matrix. Calls for different panels may run at the same time. Returns 0, or -1, nothing written, where the range is
// not such a one or this source cannot become m's format. A range of no rows asks whether it can.
KVASIR_API int32_t kvasir_pack(const Matrix* m, int32_t source, const uint8_t* rows, int64_t row_bytes,
                               int64_t first_row, int64_t num_rows) {
    if (!kvasir::is_sound(*m) || first_row < 0 || num_rows < 0 || first_row > m->rows - num_rows) return -1;
    if (first_row % kvasir::PANEL != 0) return -1;
    if (num_rows % kvasir::PANEL != 0 && first_row + num_rows != m->rows) return -1;
    const FloatMode mode;
    return kvasir::pack(*m, source, rows, row_bytes, first_row, num_rows);
}

// float32 rows [rows, m->cols], x_stride elements apart, to activations [rows] of kvasir_activated_bytes.
KVASIR_API void kvasir_prepare(const Matrix* m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows) {
    const FloatMode mode;
    kernels().prepare(*m, out, x, x_stride, rows);
}

// out[r][n] = residual[r][n] + (bias[n] + sum over k of activated[r][k] * m[n][k]), for all r and the n of the panels
// [first_panel, last_panel), 16 to a panel. out and residual: float32 [rows, m->rows] with strides in elements; bias:
// float32 [m->rows]. bias and residual may be null, residual may be out. The sum: matrix.h's segments, each a chain in
// ascending k, joined by a balanced tree. Runs on the calling thread.
KVASIR_API void kvasir_linear(const Matrix* m, const uint8_t* activated, int64_t rows, int64_t first_panel,
                              int64_t last_panel, float* out, int64_t out_stride, const float* bias,
                              const float* residual, int64_t residual_stride) {
    const FloatMode mode;
    kernels().linear(*m, activated, rows, first_panel, last_panel, out, out_stride, bias, residual, residual_stride);
}

// Rows `ids` [count] of a matrix as float32 [count, m->cols], out_stride elements apart. ids are in [0, m->rows).
KVASIR_API void kvasir_lookup(const Matrix* m, float* out, int64_t out_stride, const int64_t* ids, int64_t count) {
    const FloatMode mode;
    kernels().lookup(*m, out, out_stride, ids, count);
}
