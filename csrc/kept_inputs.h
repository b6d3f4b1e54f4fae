// The stored inputs of a piece, for the kernels of recurrent layers.
#pragma once

#include "input_rows.h"
#include "piece.h"

namespace kvasir {
namespace KVASIR_ISA {

class Kept {
public:
    Kept(const InputRows& rows, const Piece& piece)
        : r(rows), piece(piece), table(piece.tables[rows.group]),
          home(piece.start > 0 ? (piece.start - 1) / rows.block_size : 0) {}

    float* block(int64_t index) const { return r.blocks + table[index] * r.block_stride; }
    float* row(int64_t index, int64_t token) const {
        return block(index) + r.state_size + (token - index * r.block_size + r.taps - 1) * r.inputs;
    }
    // The row of a token of this step.
    float* own(int64_t token) const { return row(token / r.block_size, token); }
    // The row of a token before the piece; null before the sequence.
    const float* before(int64_t token) const { return token < 0 ? nullptr : row(home, token); }

    const InputRows& r;
    const Piece& piece;
    const int32_t* const table;
    const int64_t home;  // the block of the token before the piece
};

}  // namespace KVASIR_ISA
}  // namespace kvasir
