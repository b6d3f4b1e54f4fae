// The gated delta rule over paged states (arXiv:2412.06464): linear attention with one matrix per head as its state.
//
//     S <- exp(g) S;   S <- S + k (beta (v - k S));   o = q S          for one token after the other
//
// A head of v has one decay exp(g), or one for each dimension of k, that is, for each row of S (arXiv:2510.26692).
// q, k and v are the layer's inputs after a short causal convolution; q and k are normalised. A block of the cache holds
// the state at its start and, as rows, the inputs of the tokens before it that the convolution needs, then its own:
//
//     state [V][d][e] | before [K - 1][I] | own [block size][I]        I = channels of q, k and v, then b and a
//
// A row of the runner also has the state after its last token. A piece that continues there starts from it; any other
// walks its block again from the start, token by token with the same operations, so both have the same bits.
#pragma once

#include <cstdint>

#include "piece.h"

namespace kvasir {

constexpr int64_t MAX_DELTA_DIM = 256, MAX_TAPS = 8;

struct DeltaArgs {
    int32_t qk_heads, v_heads;  // v_heads / qk_heads heads of v share a q and a k:
    int32_t tiled, decays;      // adjacent ones or, if tiled, those with the same remainder; decays of a head: 1 or dim
    int32_t dim, v_dim;         // d and e: widths of a head of q and k, and of v
    int32_t taps, function;     // of the convolution, and applied after it
    int32_t block_size, group;  // tokens, and the index of the block table
    float strength;             // the greatest beta
    int32_t reserved;
    float* blocks;              // block 0; each `block_stride` floats after the last
    int64_t block_stride;
    float* states;              // [rows of the runner, V, d, e]
    const float *q, *k, *v;     // [tokens, heads * width]
    const float *b, *a;         // [tokens] from the layer's first head of v on, `gate_stride` heads apart; a has
    int64_t gate_stride;        // `decays` floats per head
    const float* kernel;        // [taps][channels]; the last tap is the token's own
    const float *log_rate, *bias;  // [V * decays]: decay = exp(-exp(log_rate) softplus(a + bias)),
                                   // beta = strength * sigmoid(b)
    float* out;                 // [tokens, V * e]
    const Piece* pieces;
    int64_t num_pieces;

    int64_t channels() const { return 2 * int64_t{qk_heads} * dim + int64_t{v_heads} * v_dim; }
    int64_t inputs() const { return channels() + (1 + int64_t{decays}) * v_heads; }
    int64_t state_size() const { return int64_t{dim} * v_dim; }  // of one head
};

}  // namespace kvasir
