// What the kernels of recurrent layers share: a state is a matrix whose columns never mix, so the kernels walk it one
// strip of columns at a time, and every thread takes whole heads.
#pragma once

#include "piece.h"
#include "simd_math.h"
#include "team.h"

namespace kvasir {
namespace KVASIR_ISA {

constexpr int64_t RUN = 16;  // tokens that are prepared at a time: their vectors stay in the first cache
// Some columns of a state lie apart in memory, which the first cache cannot hold; at least FEW tokens copy them to a
// strip of at most this many floats.
constexpr int64_t STRIP = 4096, FEW = 4;
#if defined(KVASIR_AVX512)
constexpr int MOST_VECTORS = 4;
#elif defined(KVASIR_AVX2)
constexpr int MOST_VECTORS = 2;
#else
constexpr int MOST_VECTORS = 1;
#endif

// The first numbers of a vector: all of them unless `count` is smaller.
KVASIR_INLINE f32x16 some(const float* from, int64_t count) {
    return count < LANES ? load_first(from, count) : load(from);
}
KVASIR_INLINE void put_some(float* to, f32x16 x, int64_t count) {
    count < LANES ? store_first(to, x, count) : store(to, x);
}

// V vectors of columns of a state, from `column` on; REST: the last columns, fewer than a vector.
template <int V, bool REST>
struct Columns {
    int64_t column;
};

// Calls walk(Columns) for all `width` columns, MOST vectors at a time.
template <int MOST, typename Walk>
KVASIR_INLINE void all_columns(int64_t width, Walk walk) {
    int64_t at = 0;
    for (; at + MOST * LANES <= width; at += MOST * LANES) walk(Columns<MOST, false>{at});
    for (; at + LANES <= width; at += LANES) walk(Columns<1, false>{at});
    if (at < width) walk(Columns<1, true>{at});
}

// V vectors of each of `count` rows.
template <int V>
KVASIR_INLINE void copy_columns(float* to, int64_t to_stride, const float* from, int64_t from_stride, int64_t count) {
    for (int64_t i = 0; i < count; ++i, to += to_stride, from += from_stride) {
        for (int v = 0; v < V; ++v) store(to + v * LANES, load(from + v * LANES));
    }
}

// Calls walk(first, stride): where the columns of a state of `rows` rows of `width` numbers begin, and how many floats
// apart the rows are. Columns that several `tokens` use are copied together first, and back afterwards.
template <int V, bool REST, typename Walk>
KVASIR_INLINE void in_strip(Columns<V, REST> columns, float* state, int64_t rows, int64_t width, int64_t tokens,
                            Walk walk) {
    float* const first = state + columns.column;
    if (REST || tokens < FEW || rows * V * LANES > STRIP) return walk(first, width);
    alignas(64) float strip[STRIP];
    copy_columns<V>(strip, V * LANES, first, width, rows);
    walk(strip, V * LANES);
    copy_columns<V>(first, width, strip, V * LANES, rows);
}

// Calls even(i) and odd(i + 1) for the rows of a state: sums over rows have two chains.
template <typename Even, typename Odd>
KVASIR_INLINE void in_pairs(int64_t count, Even even, Odd odd) {
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
        even(i);
        odd(i + 1);
    }
    if (i < count) even(i);
}

// Calls walk(piece, head) for this thread's heads. The longest walks decide how long the threads take, so each thread
// gets heads of every piece.
template <typename Walk>
void each_head(const Team& team, const Piece* pieces, int64_t num_pieces, int64_t heads, Walk walk) {
    for (int64_t i = 0; i < num_pieces; ++i) {
        for (int64_t head = 0; head < heads; ++head) {
            if ((i * heads + head) % team.threads == team.thread) walk(pieces[i], head);
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
