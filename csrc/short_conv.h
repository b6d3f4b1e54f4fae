// The gated short convolution over paged inputs, as in LFM2: a depthwise, causal convolution of b * x, gated by c.
//
//     u[t] = b[t] * x[t];   out[t] = c[t] * (bias + sum over i of kernel[i] * u[t - taps + 1 + i])
//
// A block of the cache holds u of its own tokens and of those before it that its first token needs, zeros before the
// sequence:
//
//     before [taps - 1][width] | own [block size][width]
//
// So a token reads one block, wherever a step, a row or a prefix begins.
#pragma once

#include <cstdint>

#include "piece.h"

namespace kvasir {

struct ShortConvArgs {
    int32_t width, taps;
    int32_t block_size, group;  // tokens, and the index of the block table
    float* blocks;              // block 0; each `block_stride` floats after the last
    int64_t block_stride;
    const float *b, *c, *x;     // [tokens, width]
    const float* kernel;        // [taps][width]; the last tap is the token's own
    const float* bias;          // [width], or null
    float* out;                 // [tokens, width]
    const Piece* pieces;
    int64_t num_pieces;
};

}  // namespace kvasir
