// Low-rank changes of matrices (Hu et al., 2021), for each row apart, in float32:
//
//     t = scale (A x)                        as `linear` sums it, by the segments of A
//     y = y + B t                            one ascending chain over the rank, which begins at y
//     y = y + scale bias
//     y = factors y                          of each output (Liu et al., 2024)
#pragma once

#include "matrix.h"

namespace kvasir {

// What an adapter changes in one slot of a model: a matrix [N, K] of a linear or of an expert, a table [N, width], or a
// norm. All matrices are float, with ACT_F32; b and bias include the adapter's own scale. What it leaves alone is null.
struct LowRank {
    const Matrix* a;       // [rank, K]; of a table its transpose, [N, rank]
    const Matrix* b;       // [N, rank]; of a table [width, rank]
    const float* bias;     // [N]
    const float* factors;  // [N]; of a table [width]
    const Matrix* replacement;  // of the whole matrix or table
    const Matrix* rows;    // [n, K] or [n, width]: replace the rows of `ids`
    const int32_t* ids;    // [n], ascending
    const float* vector;   // replaces the bias of a linear, or the weights of a norm
    const float* second;   // replaces the bias of a norm
    const LowRank* experts;  // of a mixture: of each of its experts that this rank has
};

// 16 elements of scale (A x): those of a panel of A.
struct Shrink {
    const Matrix* a;
    int64_t panel;
    const float* x;  // [K]
    float* out;      // [16]
    float scale;
};

// The change of some rows of a product.
struct Expand {
    const LowRank* change;
    const float* inner;     // t of each, `inner_stride` apart
    int64_t inner_stride;
    const int32_t* rows;    // [count]: their places in out
    const float* scales;    // [count]
    int64_t count;
    float* out;
    int64_t out_stride;
};

// A row of scale * W + B A: in each column an ascending chain over the rank that begins with W's number.
struct ChangedRow {
    float* w;        // [cols], overwritten
    const float* a;  // [rank, cols]
    const float* b;  // [rank]
    int64_t cols, rank;
    int32_t segments;
    float scale;
};

namespace KVASIR_ISA {

void shrink(const Shrink* jobs, int64_t count);
// For the panels [first, last) of B.
void expand(const Expand& job, int64_t first_panel, int64_t last_panel);
// The sum of squares of each segment of a row, in float64: of every eighth column in ascending order, then of those.
void squares(const ChangedRow& row, double* out);

}  // namespace KVASIR_ISA
}  // namespace kvasir
