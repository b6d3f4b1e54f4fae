// One sequence's part of a step: the only description that the gather, attention and the rest of a step read.
#pragma once

#include <cstdint>

namespace kvasir {

// PIECE_SAMPLE: an id is sampled from the logits of each of the last 1 + drafted rows. PIECE_LOGITS: those logits are
// computed and left in the buffer, after those of all pieces that sample. PIECE_BIDIRECTIONAL: every row sees all of
// [0, start + count).
enum PieceFlag : int32_t { PIECE_SAMPLE = 1, PIECE_BIDIRECTIONAL = 2, PIECE_LOGITS = 4 };

struct Piece {
    int32_t row, flags;           // the row of the runner
    int64_t start, count;         // the positions [start, start + count)
    int64_t drafted = 0;          // how many of its last ids are a draft; less than count
    int64_t first = 0;            // its first token row; filled in by the gather, as are the tables
    const int32_t* const* tables = nullptr;  // per cache group, block ids that cover [0, start + count); blocks
                                             // outside of the window may be stale
    int64_t reached = 0;          // the tokens after which the row's recurrent states are, 0 for none; as above

    bool causal() const { return !(flags & PIECE_BIDIRECTIONAL); }
};

// The first key that the query at a position attends to. window: keys of a window, its own included; 0 for all; -n for
// those in its chunk of n positions.
inline int64_t first_in_window(int64_t position, int64_t window) {
    if (window < 0) return position / -window * -window;
    return window && position >= window ? position - window + 1 : 0;
}

}  // namespace kvasir
