// LLM.int8 (arXiv:2208.07339): values of an input row that reach a threshold, its outliers, stay float32; the others
// become int8 with one scale. The paper takes a column as an outlier for all rows of a batch if it is one in any; here
// each row has its own, so that its bits do not depend on the batch.
//
// A row converted to activations with ACT_OUTLIERS has its groups first, in which outliers are 0, then an Outliers.
#pragma once

#include "matrix.h"

namespace kvasir {

constexpr int32_t ACT_OUTLIERS = 32;  // added to Matrix::activation, with an input_rule.h of ROUND_OUTLIERS

struct Outlier {
    int32_t column;
    float value;
};

struct Outliers {
    int64_t count;
    Outlier of[];  // ascending columns; with room for all
};

// Bytes of a row's Outliers, a multiple of 64; 0 for other matrices.
static inline int64_t outliers_bytes(const Matrix& m) {
    if (!(m.activation & ACT_OUTLIERS)) return 0;
    return (static_cast<int64_t>(sizeof(Outliers)) + m.cols * static_cast<int64_t>(sizeof(Outlier)) + 63) / 64 * 64;
}

namespace KVASIR_ISA {

// For an INT8 matrix with ACT_OUTLIERS, after linear_int with the same arguments: adds to each element of `out` the sum
// of its row's outliers times their weights, a chain of multiply-adds over ascending columns from 0.
void add_outliers(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                  float* out, int64_t out_stride);

}  // namespace KVASIR_ISA
}  // namespace kvasir
