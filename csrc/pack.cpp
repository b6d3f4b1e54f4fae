// Dispatches packing to the float or the integer formats.
#include "pack.h"

namespace kvasir {

static bool is_float(const Matrix& m) { return m.format < FORMAT_Q4_0; }

int64_t panel_bytes(const Matrix& m) { return (is_float(m) ? panel_bytes_float : panel_bytes_int)(m); }

int64_t activated_bytes(const Matrix& m) { return (is_float(m) ? activated_bytes_float : activated_bytes_int)(m); }

int32_t format_of(int32_t ggml_type) {
    const int32_t format = format_of_float(ggml_type);
    return format >= 0 ? format : format_of_int(ggml_type);
}

int32_t pack(const Matrix& m, int32_t source, const uint8_t* rows, int64_t row_bytes, int64_t first_row,
             int64_t num_rows) {
    return (is_float(m) ? pack_float : pack_int)(m, source, rows, row_bytes, first_row, num_rows);
}

}  // namespace kvasir
