// The indexer: scores of keys, and the positions with the greatest ones.
//
// A score is a chain of multiply-adds in the order of a head's dimensions, then of the heads, so its bits depend on the
// two rows only. A step with fewer rows than threads divides the keys of each row among all threads.
#include "indexer.h"

#include <cstring>

#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int64_t HEADS_AT_ONCE = 4;

struct Row {
    const Piece* piece;
    int64_t token, position;

    int64_t seen() const { return position + 1; }
};

Row row_at(const Piece* pieces, int64_t row) {
    while (row >= pieces->count) row -= (pieces++)->count;
    return {pieces, pieces->first + row, pieces->start + row};
}

int64_t count_rows(const Piece* pieces, int64_t num_pieces) {
    int64_t rows = 0;
    for (int64_t i = 0; i < num_pieces; ++i) rows += pieces[i].count;
    return rows;
}

float* key_at(const IndexArgs& a, const Piece& piece, int64_t position) {
    const int64_t block = piece.tables[a.group][position / a.block_size];
    return a.blocks + (block * a.block_size + position % a.block_size) * a.dim;
}

// 16 keys as [dim][16]. Keys from `count` on are zeros: what they would be is not written yet.
void turn_tile(const IndexArgs& a, const Piece& piece, int64_t first, int64_t count, float* tile) {
    const float* from = key_at(a, piece, first);
    for (int64_t token = 0; token < LANES; ++token) {
        for (int64_t i = 0; i < a.dim; ++i) tile[i * LANES + token] = token < count ? from[token * a.dim + i] : 0.0f;
    }
}

template <int64_t N>
KVASIR_INLINE f32x16 add_heads(const IndexArgs& a, const float* tile, const float* q, const float* weights, f32x16 total) {
    f32x16 sums[N];
    for (int64_t h = 0; h < N; ++h) sums[h] = broadcast(0.0f);
    for (int64_t i = 0; i < a.dim; ++i) {
        const f32x16 keys = load(tile + i * LANES);
        for (int64_t h = 0; h < N; ++h) sums[h] = fma(keys, broadcast(q[h * a.dim + i]), sums[h]);
    }
    for (int64_t h = 0; h < N; ++h) {
        const f32x16 score = max(broadcast(0.0f), mul(sums[h], broadcast(a.scale)));
        total = fma(broadcast(weights[h]), score, total);
    }
    return total;
}

// The scores of the tiles [first, last) of a row's keys.
void score_tiles(const IndexArgs& a, const Row& row, int64_t first, int64_t last, float* scores) {
    alignas(64) float tile[MAX_INDEX_DIM * LANES];
    const float *q = a.q + row.token * a.heads * a.dim, *weights = a.weights + row.token * a.heads;
    for (int64_t at = first * LANES; at < last * LANES; at += LANES) {
        turn_tile(a, *row.piece, at, row.seen() - at, tile);
        f32x16 total = broadcast(0.0f);
        int64_t h = 0;
        for (; h + HEADS_AT_ONCE <= a.heads; h += HEADS_AT_ONCE) {
            total = add_heads<HEADS_AT_ONCE>(a, tile, q + h * a.dim, weights + h, total);
        }
        for (; h < a.heads; ++h) total = add_heads<1>(a, tile, q + h * a.dim, weights + h, total);
        store(scores + at, total);
    }
}

int64_t tiles_of(const Row& row) { return (row.seen() + LANES - 1) / LANES; }

// Integers in the order of floats, with -0 as 0, and NaN the greatest.
uint32_t ordered(float score) {
    if (score != score) return ~0u;
    score += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The top_k-th greatest of `keys`, digit by digit. equal: how many that are equal to it belong to the top_k.
uint32_t threshold(const uint32_t* keys, int64_t count, int64_t top_k, int64_t& equal) {
    uint32_t prefix = 0, mask = 0;
    equal = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {};
        for (int64_t i = 0; i < count; ++i) {
            if ((keys[i] & mask) == prefix) ++counts[keys[i] >> shift & 255];
        }
        uint32_t digit = 255;
        while (counts[digit] < equal) equal -= counts[digit--];
        prefix |= digit << shift;
        mask |= 255u << shift;
    }
    return prefix;
}

void select_all(const IndexArgs& a, const Row& row) {
    int32_t* out = a.out + row.token * a.top_k;
    for (int64_t i = 0; i < a.top_k; ++i) out[i] = i < row.seen() ? static_cast<int32_t>(i) : -1;
}

// Writes the positions of the top_k greatest scores; there are more scores than that. Overwrites the scores.
void select_best(const IndexArgs& a, const Row& row, float* scores) {
    uint32_t* keys = reinterpret_cast<uint32_t*>(scores);
    for (int64_t i = 0; i < row.seen(); ++i) {
        const uint32_t key = ordered(scores[i]);
        std::memcpy(keys + i, &key, sizeof key);
    }
    int64_t equal = 0;
    const uint32_t least = threshold(keys, row.seen(), a.top_k, equal);
    int32_t* out = a.out + row.token * a.top_k;
    for (int64_t i = 0; i < row.seen(); ++i) {
        if (keys[i] > least || (keys[i] == least && equal-- > 0)) *out++ = static_cast<int32_t>(i);
    }
}

float* scores_of(const IndexArgs& a, int64_t thread) {
    return reinterpret_cast<float*>(a.scratch + thread * index_scratch(a.max_tokens));
}

// Each row on a thread of its own.
void select_apart(const IndexArgs& a, int64_t rows, const Team& team) {
    for (int64_t i = team.thread; i < rows; i += team.threads) {
        const Row row = row_at(a.pieces, i);
        if (row.seen() <= a.top_k) {
            select_all(a, row);
            continue;
        }
        score_tiles(a, row, 0, tiles_of(row), scores_of(a, team.thread));
        select_best(a, row, scores_of(a, team.thread));
    }
}

// All threads score each row; its scores are in the scratch memory of the thread that then selects.
void select_together(const IndexArgs& a, int64_t rows, const Team& team) {
    for (int64_t i = 0; i < rows; ++i) {
        const Row row = row_at(a.pieces, i);
        if (row.seen() <= a.top_k) continue;
        const Range mine = share(team, tiles_of(row));
        score_tiles(a, row, mine.begin, mine.end, scores_of(a, i));
    }
    team.barrier();
    if (team.thread >= rows) return;
    const Row row = row_at(a.pieces, team.thread);
    row.seen() <= a.top_k ? select_all(a, row) : select_best(a, row, scores_of(a, team.thread));
}

}  // namespace

void select_tokens(const IndexArgs& a, const Team& team) {
    const int64_t rows = count_rows(a.pieces, a.num_pieces);
    const Range mine = share(team, rows);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const Row row = row_at(a.pieces, i);
        std::memcpy(key_at(a, *row.piece, row.position), a.k + row.token * a.dim, static_cast<size_t>(a.dim) * sizeof *a.k);
    }
    team.barrier();
    rows < team.threads ? select_together(a, rows, team) : select_apart(a, rows, team);
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
