// Packs a file's rows into the panels of matrix.h. Split by the kind of numbers, like linear.h.
#pragma once

#include "matrix.h"

namespace kvasir {

// The format that holds the values of this GGML type bit for bit, -1 if there is none.
int32_t format_of(int32_t ggml_type);

// Rows of a file (blocks of GGML type `source`, `row_bytes` from one to the next) into the panels that cover
// [first_row, first_row + num_rows). first_row is a multiple of PANEL; so is num_rows, unless the rows end the matrix.
// Floats of another type than the matrix's are converted: exactly to a wider type, else to the nearest value. Returns
// 0, or -1 and writes nothing if this source cannot be converted to this format.
int32_t pack(const Matrix& m, int32_t source, const uint8_t* rows, int64_t row_bytes, int64_t first_row,
             int64_t num_rows);

// pack_float.cpp
int64_t panel_bytes_float(const Matrix& m);
int64_t activated_bytes_float(const Matrix& m);
int32_t format_of_float(int32_t ggml_type);
int32_t pack_float(const Matrix& m, int32_t source, const uint8_t* rows, int64_t row_bytes, int64_t first_row,
                   int64_t num_rows);

// pack_int.cpp
int64_t panel_bytes_int(const Matrix& m);
int64_t activated_bytes_int(const Matrix& m);
int32_t format_of_int(int32_t ggml_type);
int32_t pack_int(const Matrix& m, int32_t source, const uint8_t* rows, int64_t row_bytes, int64_t first_row,
                 int64_t num_rows);

}  // namespace kvasir
