// RWKV-7 (arXiv:2503.14456) over paged states: the token shift, and linear attention with one matrix per head as its
// state, from which a vector of its own, not the written key, removes.
//
//     S <- diag(w) S - (rate n) (n S) + k v;   o = r S          for one token after the other
//
// with n = k_k key, normalised; k = key (1 + k_a (rate - 1)); rate = sigmoid(a); w = exp(-e^-0.5 sigmoid(w)). Then, per
// head, a norm of o and a bonus: (sum of r k r_k) v. Two ops: the shift, which keeps its inputs, and the rule.
//
// A block of the cache holds the state at its start and, as rows, the inputs of the token before it and of its own:
//
//     state [H][d][d] | before [1][I] | own [block size][I]     I = inputs of the shift, then w, key, v and a
//
// A row of the runner also has the state after its last token. A piece that continues there starts from it; any other
// walks its block again from the start, token by token with the same operations, so both have the same bits.
#pragma once

#include <cstdint>

#include "input_rows.h"
#include "piece.h"

namespace kvasir {

constexpr int64_t MAX_WKV_DIM = 256, MAX_MIXES = 6;

// out[i] = x + mix[i] * (the previous token's x - x), which is 0 before the sequence.
struct ShiftArgs {
    InputRows rows;      // of two taps; x is the beginning of a row
    int64_t width;
    int32_t count, reserved;  // results
    const float* x;      // [tokens, width]
    const float* mix;    // [count][width]
    float* out[MAX_MIXES];  // [tokens, width] each
    const Piece* pieces;
    int64_t num_pieces;
};

struct WkvArgs {
    InputRows rows;          // of two taps; w, key, v and a are the end of a row
    int32_t heads, dim;      // dim: of r, w, key, v and a of a head
    float eps;               // of the norm
    int32_t reserved;
    float* states;           // [rows of the runner, H, d, d]
    const float *r, *w, *k, *v, *a;  // [tokens, H * d]
    const float *k_k, *k_a, *r_k;    // [H * d]
    const float *weight, *bias;      // of the norm, [H * d]; null for no norm
    float* out;                      // [tokens, H * d]
    const Piece* pieces;
    int64_t num_pieces;

    int64_t width() const { return int64_t{heads} * dim; }
    int64_t state_size() const { return int64_t{dim} * dim; }  // of one head
};

}  // namespace kvasir
