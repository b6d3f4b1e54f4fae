// Attention over the paged cache (mathematics: arXiv:1706.03762, online softmax: arXiv:1805.02867, the paged cache:
// arXiv:2309.06180).
//
// The order of a row's operations depends on its position only. It processes the keys that it attends to in ascending
// order:
//
//     chunk   1024 aligned keys with their own maximum, sum of weights and weighted values; merged at its end
//     step    64 aligned keys: scores, their maximum and weights; the chunk's results so far are rescaled
//     tile    16 keys: one vector of scores
//
// An item is up to 16 rows (adjacent queries times heads of one KV head) that are processed together. Items are divided
// among the threads by cost. An item that is a large part of a thread's share may be split between chunks: the thread
// with the first keys merges its chunks as they end, the others store theirs, and after a barrier the first thread
// merges the stored chunks in ascending order. The bits therefore do not depend on where an item is split.
#include "attention_step.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// --- chunks and rows ------------------------------------------------------------------------------------------------

void begin_chunk(AttentionState& state, int64_t rows, int64_t width) {
    store(state.top, lowest());
    for (int64_t row = 0; row < rows; ++row) {
        store(state.sum + row * LANES, broadcast(0.0f));
        for (int64_t i = 0; i < width; i += LANES) store(state.mixed + row * MAX_HEAD_DIM + i, broadcast(0.0f));
    }
}

// The results of a finished chunk, computed by this thread or another.
struct Chunk {
    const float* top;  // [ATTENTION_ROWS]
    const float* sum;  // [ATTENTION_ROWS]
    const float* mixed;
    int64_t stride;  // between rows of mixed
};

void add_weights(const AttentionState& state, int64_t rows, float* sums) {
    for (int64_t row = 0; row < rows; ++row) sums[row] = sum(load(state.sum + row * LANES));
}

// For the rows that attend to a key of [begin, end):
// total = total * e^(old top - new top) + chunk * e^(chunk top - new top).
void merge_chunk(AttentionState& state, const Chunk& chunk, int64_t rows, int64_t width, int64_t begin, int64_t end) {
    const f32x16 before = load(state.total_top), of_chunk = load(chunk.top);
    const f32x16 top = max(of_chunk, before), base = select(less(lowest(), top), top, broadcast(0.0f));
    float tops[LANES], keep[LANES], take[LANES];
    store(tops, top);
    store(keep, exp_down(sub(before, base)));
    store(take, exp_down(sub(of_chunk, base)));
    for (int64_t row = 0; row < rows; ++row) {
        if (state.last[row] <= begin || state.first[row] >= end) continue;
        const f32x16 kept = broadcast(keep[row]), taken = broadcast(take[row]);
        float* total = state.total + row * MAX_HEAD_DIM;
        const float* mixed = chunk.mixed + row * chunk.stride;
        for (int64_t i = 0; i < width; i += LANES) {
            store(total + i, fma(load(total + i), kept, mul(load(mixed + i), taken)));
        }
        state.total_sum[row] = __builtin_fmaf(state.total_sum[row], keep[row], chunk.sum[row] * take[row]);
        state.total_top[row] = tops[row];
    }
}

void merge_own(AttentionState& state, int64_t rows, int64_t width, int64_t begin, int64_t end) {
    float sums[ATTENTION_ROWS];
    add_weights(state, rows, sums);
    merge_chunk(state, {state.top, sums, state.mixed, MAX_HEAD_DIM}, rows, width, begin, end);
}

// The address of stored chunk `place`: its maxima, sums and rows of mixed, without padding between chunks.
float* kept_chunk(AttentionState& state, int64_t rows, int64_t width, int64_t place) {
    return reinterpret_cast<float*>(&state + 1) + place * kept_floats(rows, width);
}

void keep_chunk(AttentionState& state, int64_t rows, int64_t width, int64_t place) {
    float* to = kept_chunk(state, rows, width, place);
    store(to, load(state.top));
    add_weights(state, rows, to + ATTENTION_ROWS);
    float* mixed = to + 2 * ATTENTION_ROWS;
    for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(mixed + row * width, state.mixed + row * MAX_HEAD_DIM, static_cast<size_t>(width) * sizeof(float));
    }
}

// out = total / sum of the weights, where a sink adds one weight. Zeros if all weights are 0.
void finish_rows(const AttentionArgs& args, const Item& item, AttentionState& state) {
    const int64_t rows = item.rows(), dim = value_dim(args.layout);
    float factor[LANES], weight[LANES];
    store(weight, load(state.total_sum));
    store(factor, broadcast(1.0f));
    if (args.sinks) {
        float sinks[LANES];
        store(sinks, lowest());
        for (int64_t row = 0; row < rows; ++row) sinks[row] = args.sinks[item.head + row % item.heads];
        const f32x16 before = load(state.total_top), sink = load(sinks), top = max(sink, before);
        const f32x16 base = select(less(lowest(), top), top, broadcast(0.0f));
        const f32x16 kept = exp_down(sub(before, base));
        store(factor, kept);
        store(weight, fma(load(state.total_sum), kept, exp_down(sub(sink, base))));
    }
    for (int64_t row = 0; row < rows; ++row) {
        const f32x16 kept = broadcast(factor[row]), divisor = broadcast(weight[row] == 0.0f ? 1.0f : weight[row]);
        const int64_t token = item.piece->first + item.query + row / item.heads;
        float* out = args.out + token * args.out_stride + (item.head + row % item.heads) * dim;
        const float* total = state.total + row * MAX_HEAD_DIM;
        for (int64_t i = 0; i < dim; i += LANES) {
            const f32x16 x = div(mul(load(total + i), kept), divisor);
            dim - i < LANES ? store_first(out + i, x, dim - i) : store(out + i, x);
        }
    }
}

template <typename F>
void begin_rows(const AttentionArgs& args, const Item& item, AttentionState& state) {
    const int64_t rows = item.rows(), dim = args.layout.head_dim, width = mixed_dim(args.layout);
    store(state.total_top, lowest());
    store(state.total_sum, broadcast(0.0f));
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t token = item.piece->first + item.query + row / item.heads;
        F::load_query(state, row, args.q + token * args.q_stride + (item.head + row % item.heads) * dim, dim);
        state.first[row] = first_seen(args, item.position(row));
        state.last[row] = last_seen(args, *item.piece, item.position(row));
        for (int64_t i = 0; i < width; i += LANES) store(state.total + row * MAX_HEAD_DIM + i, broadcast(0.0f));
    }
}

// Processes the keys [item.begin, item.end) in chunks. If they include the item's first key, chunks are merged into the
// totals, else they are stored. `following` is this thread's next item; its first keys are prefetched at the end.
template <typename F>
void attend(const AttentionArgs& args, const Item& item, const Item& following, AttentionState& state) {
    const int64_t rows = item.rows(), width = mixed_dim(args.layout);
    begin_rows<F>(args, item, state);
    const int64_t first_step = item.begin / STEP_TOKENS * STEP_TOKENS;
    Step step, next;
    next.find(args, item, first_step);
    for (int64_t chunk = item.begin / CHUNK_TOKENS * CHUNK_TOKENS; chunk < item.end; chunk += CHUNK_TOKENS) {
        begin_chunk(state, rows, width);
        const int64_t end = lesser(chunk + CHUNK_TOKENS, item.end);
        for (int64_t at = larger(chunk, first_step); at < end; at += STEP_TOKENS) {
            step = next;
            if (at + STEP_TOKENS < item.end) {
                next.find(args, item, at + STEP_TOKENS);
            } else {
                next.find(args, following, following.begin / STEP_TOKENS * STEP_TOKENS);
            }
            score<F>(state, step, next, rows, args.layout);
            weigh<F>(args, item, state, step);
            mix<F>(args, state, step, next, rows);
        }
        if (item.begin == item.low) {
            merge_own(state, rows, width, chunk, end);
        } else {
            keep_chunk(state, rows, width, (chunk - item.begin) / CHUNK_TOKENS);
            state.kept_end = end;
        }
    }
    if (item.begin == item.low && item.end == item.high) finish_rows(args, item, state);
}

AttentionState& state_of(const AttentionArgs& args, int32_t thread) {
    return *reinterpret_cast<AttentionState*>(args.scratch + thread * attention_scratch(args.layout, args.heads));
}

// Completes an item that attend() began: merges the chunks that the following threads stored.
void merge_kept(const AttentionArgs& args, const Item& item, int32_t thread) {
    AttentionState& state = state_of(args, thread);
    const int64_t rows = item.rows(), width = mixed_dim(args.layout);
    int64_t begin = item.end;
    while (begin < item.high) {
        AttentionState& other = state_of(args, ++thread);
        for (int64_t place = 0; begin < other.kept_end; ++place, begin += CHUNK_TOKENS) {
            const float* kept = kept_chunk(other, rows, width, place);
            const Chunk chunk{kept, kept + ATTENTION_ROWS, kept + 2 * ATTENTION_ROWS, width};
            merge_chunk(state, chunk, rows, width, begin, lesser(begin + CHUNK_TOKENS, item.high));
        }
    }
    finish_rows(args, item, state);
}

// --- items, and a thread's share of them ----------------------------------------------------------------------------

// Items of fewer keys, or that cost less than this fraction of a thread's share, are not split: it does not pay.
constexpr int64_t WHOLE_TOKENS = 2 * CHUNK_TOKENS, WHOLE_PART = 32;

// How heads and queries are grouped into items. The heads of a KV head are divided into equal parts of at most 16.
struct Cut {
    int64_t group, heads, parts, queries;

    explicit Cut(const AttentionArgs& args) {
        group = args.heads / args.layout.kv_heads;
        parts = (group + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
        heads = (group + parts - 1) / parts;
        queries = ATTENTION_ROWS / heads;
    }
};

// The queries of an item, the same for all heads. The cost estimates the time: steps over the cache, and a quarter of a
// step for the item itself, each with a constant part for the loads and a part for each row.
struct Queries {
    int64_t first, count, low, high, cost;

    Queries(const AttentionArgs& args, const Piece& piece, const Cut& cut, int64_t query) {
        first = query;
        count = lesser(cut.queries, piece.count - query);
        low = first_seen(args, piece.start + query);
        high = last_seen(args, piece, piece.start + query + count - 1);
        const int64_t steps = (high + STEP_TOKENS - 1) / STEP_TOKENS - low / STEP_TOKENS;
        cost = (4 * steps + 1) * (6 + count * cut.heads);
    }
};

// Iterates over this thread's share of the cost: whole items, or runs of their chunks. All threads enumerate the items
// in the same order and round a boundary between two shares in the same way.
struct Walk {
    const AttentionArgs& args;
    const Cut cut;
    const int64_t lanes;  // KV heads times parts per KV head
    int64_t fair;         // the cost of an equal share
    bool cuts = false;    // whether items may be split; the same on all threads
    int64_t begin, end, at = 0, piece = 0, lane = 0, query = 0;

    Walk(const AttentionArgs& args, const Team& team) : args(args), cut(args), lanes(args.layout.kv_heads * cut.parts) {
        int64_t all = 0, max_cost = 0;
        for (int64_t i = 0; i < args.num_pieces; ++i) all += lanes * cost_of(args.pieces[i], max_cost);
        begin = all * team.thread / team.threads;
        end = all * (team.thread + 1) / team.threads;
        fair = all / team.threads;
        cuts = team.threads > 1 && max_cost * WHOLE_PART >= fair;
    }

    bool find(Item& item) {
        while (piece < args.num_pieces && at < end) {
            const Piece& of = args.pieces[piece];
            if (lane == 0 && query == 0) {
                int64_t max_cost = 0;
                const int64_t cost = lanes * cost_of(of, max_cost);
                if (cost == 0 || at + cost <= begin) {
                    at += cost;
                    ++piece;
                    continue;
                }
            }
            const Queries queries(args, of, cut, query);
            const int64_t from = border(queries, begin), to = border(queries, end);
            if (from < to) item = this_one(of, queries, from, to);
            at += queries.cost;
            query += cut.queries;
            if (query >= of.count) {
                query = 0;
                piece += ++lane == lanes;
                lane %= lanes;
            }
            if (from < to) return true;
        }
        return false;
    }

  private:
    // The cost of a piece for one lane. Raises max_cost to the greatest cost of an item with enough keys to be split.
    int64_t cost_of(const Piece& of, int64_t& max_cost) const {
        int64_t cost = 0;
        for (int64_t from = 0; from < of.count; from += cut.queries) {
            const Queries queries(args, of, cut, from);
            cost += queries.cost;
            if (queries.high - queries.low >= WHOLE_TOKENS) max_cost = larger(max_cost, queries.cost);
        }
        return cost;
    }

    bool is_cut(const Queries& queries) const {
        const int64_t chunks = (queries.high - 1) / CHUNK_TOKENS - queries.low / CHUNK_TOKENS;  // after the first chunk
        const int64_t size = kept_floats(queries.count * cut.heads, mixed_dim(args.layout));
        return cuts && queries.high - queries.low >= WHOLE_TOKENS && queries.cost * WHOLE_PART >= fair &&
               chunks * size <= kept_room(args.layout);
    }

    // The key at which a boundary between shares, given as a cost, divides the item that begins at cost `at`.
    int64_t border(const Queries& queries, int64_t cost) const {
        const int64_t low = queries.low, high = queries.high, inside = cost - at;
        if (inside <= 0) return low;
        if (inside >= queries.cost) return high;
        if (!is_cut(queries)) return 2 * inside < queries.cost ? low : high;
        const int64_t key = low + inside * (high - low) / queries.cost;
        const int64_t chunk = (key + CHUNK_TOKENS / 2) / CHUNK_TOKENS * CHUNK_TOKENS;
        return larger(low, lesser(chunk, high));
    }

    Item this_one(const Piece& of, const Queries& queries, int64_t from, int64_t to) const {
        const int64_t kv_head = lane / cut.parts, head = kv_head * cut.group + lane % cut.parts * cut.heads;
        const int64_t heads = lesser(cut.heads, (kv_head + 1) * cut.group - head);
        return {&of, kv_head, head, heads, queries.first, queries.count, queries.low, queries.high, from, to};
    }
};

template <typename F>
void attend_share(const AttentionArgs& args, const Team& team) {
    AttentionState& state = state_of(args, team.thread);
    state.kept_end = 0;
    Walk walk(args, team);
    Item item{}, following;
    for (bool more = walk.find(following); more;) {
        item = following;
        more = walk.find(following);
        attend<F>(args, item, more ? following : item, state);
    }
    if (!walk.cuts) return;
    team.barrier();
    if (item.begin == item.low && item.end < item.high) merge_kept(args, item, team.thread);
}

}  // namespace

void attention(const AttentionArgs& args, const Team& team) {
    switch (args.layout.format) {
        case CACHE_F32: return attend_share<Float32>(args, team);
        case CACHE_F16: return attend_share<Float16>(args, team);
        case CACHE_INT8: return attend_share<Int8>(args, team);
        default: return attend_share<Bfloat16>(args, team);
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
