// Selective state spaces over paged states: Mamba (arXiv:2312.00752) and Mamba 2 (arXiv:2405.21060).
//
//     x <- f(conv(x));   S <- exp(-rate step) S + (step x) B;   y = C S + D x        for one token after the other
//
// with step = softplus(dt + bias) within limits. Mamba 2 convolves B and C too, and has one rate, step and D for each
// head; Mamba has them for each channel, a rate for each row of the state too, and its B and C are not convolved. Its
// heads are only shares of the channels. Two ops: the convolution, which keeps its inputs, and the scan.
//
// A block of the cache holds the state at its start and, as rows, the inputs of the tokens before it that the
// convolution needs, then those of its own tokens:
//
//     state [H][N][P] | before [K - 1][I] | own [block size][I]     I = channels, then dt and, in Mamba, B
//
// A row of the runner also has the state after its last token. A piece that continues there starts from it; any other
// walks its block again from the start, token by token with the same operations, so both have the same bits.
#pragma once

#include <cstdint>

#include "input_rows.h"
#include "piece.h"

namespace kvasir {

constexpr int64_t MAX_SCAN_DIM = 256, MAX_SCAN_TAPS = 8;

struct ConvolutionArgs {
    InputRows rows;
    int64_t channels;
    int32_t function, reserved;  // applied at the end
    const float* x;              // [tokens, channels]
    const float* kernel;         // [taps][channels]; the last tap is the token's own
    const float* bias;           // [channels] or null
    float* out;                  // [tokens, channels]
    const Piece* pieces;
    int64_t num_pieces;
};

struct ScanArgs {
    ConvolutionArgs conv;         // as in the convolution, whose results the scan reads
    int32_t heads, groups;        // heads / groups adjacent heads share a B and a C
    int32_t dim, width;           // N and P: rows of a head's state, and its channels
    int32_t per_channel, reserved;  // 1: Mamba, 0: Mamba 2
    float low, high;              // limits of the steps
    float* states;                // [rows of the runner, H, N, P]
    const float* dt;              // [tokens, H], in Mamba [tokens, H * P]
    const float *b, *c;           // [tokens, G * N], b_stride and c_stride floats apart
    int64_t b_stride, c_stride;
    const float* rates;           // [H], in Mamba [N][H * P]
    const float *bias, *skip;     // of dt, and D: [H], in Mamba [H * P]
    float* out;                   // [tokens, H * P]

    int64_t state_size() const { return int64_t{dim} * width; }  // of one head
    int64_t inner() const { return int64_t{heads} * width; }
    int64_t steps() const { return per_channel ? inner() : heads; }  // numbers of dt per token
};

}  // namespace kvasir
