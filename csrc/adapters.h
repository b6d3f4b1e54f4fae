// Low-rank adapters (Hu et al., 2021): b (a x) is added to a matrix's product for the rows that select the adapter.
// Rows of several adapters, and rows without one, share a step.
#pragma once

#include "kernels.h"

namespace kvasir {

// What an adapter adds to one matrix [N, K]: float32 a [rank, K] and b [N, rank], which holds the scale. Both are null
// if the adapter does not change the matrix.
struct LowRank {
    const Matrix* a;
    const Matrix* b;
};

// A program's adapters and the buffers to run them. A slot is a matrix that adapters may change.
struct Adapters {
    const LowRank* const* tables;  // [count]: of each id [slots], null if there is no such adapter; id 0 is none
    int64_t count;
    int64_t max_tokens;
    int64_t rank;      // the greatest, rounded up to whole cache lines of float32
    int32_t* of_rows;  // [max_tokens]: the id of each row of the step
    float* inner;      // [matrices of one linear][max_tokens * rank]: a x
    float* sums;       // [max_tokens, widest]: products that cannot be written to their result's place yet
};

// Computes a x of all rows for one slot, into part `part` of `inner`. x: [rows, K]. Each thread of the team computes
// some of the rows.
void adapter_inner(const Adapters& adapters, int64_t slot, int64_t part, const float* x, int64_t rows,
                   const Team& team);

// Adds b (a x) to the panels [first, last) of out [rows, N], one ascending chain for each element.
void adapter_add(const Adapters& adapters, int64_t slot, int64_t part, float* out, int64_t out_stride, int64_t rows,
                 int64_t first_panel, int64_t last_panel);

}  // namespace kvasir
