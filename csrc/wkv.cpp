// RWKV-7; see wkv.h. A thread computes whole channels or heads of whole pieces, so no sum is ever split, and lanes are
// channels or columns of the state, so the instruction set changes no bit.
#include "wkv.h"

#include "kept_inputs.h"
#include "kernels.h"
#include "state_columns.h"

namespace kvasir {
namespace KVASIR_ISA {

namespace {

constexpr float LEAST_LENGTH = 1e-12f;         // that a removed key is divided by
constexpr float DECAY = -0.6065306597126334f;  // -e^-0.5: decays are at least exp of it
KVASIR_INLINE f32x16 sigmoid(f32x16 x) {
    const f32x16 one = broadcast(1.0f);
    return div(one, add(one, exp(sub(broadcast(0.0f), x))));
}

// The channels [first, first + count) of a piece.
void shift_piece(const ShiftArgs& a, const Piece& piece, int64_t first, int64_t count) {
    const Kept kept(a.rows, piece);
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    for (int64_t token = piece.start; token < piece.start + piece.count; ++token) {
        const int64_t row = (piece.first + token - piece.start) * a.width + first, index = token / a.rows.block_size;
        const float *x = a.x + row, *last = x - a.width;
        if (token == piece.start) {
            last = kept.before(token - 1);
            if (last) last += first;
        }
        if (token % a.rows.block_size == 0) {
            float* const before = kept.row(index, token - 1) + first;
            last ? std::memcpy(before, last, bytes) : std::memset(before, 0, bytes);
        }
        std::memcpy(kept.own(token) + first, x, bytes);
        for (int64_t i = 0; i < count; i += LANES) {
            const int64_t rest = count - i;
            const f32x16 own = some(x + i, rest);
            const f32x16 change = sub(last ? some(last + i, rest) : broadcast(0.0f), own);
            for (int32_t m = 0; m < a.count; ++m) {
                put_some(a.out[m] + row + i, fma(change, some(a.mix + m * a.width + first + i, rest), own), rest);
            }
        }
    }
}

// A run of tokens of one head, ready for the recurrence. Numbers after the head's are 0, except in `decay`.
struct Tokens {
    float r[RUN][MAX_WKV_DIM], k[RUN][MAX_WKV_DIM], v[RUN][MAX_WKV_DIM], decay[RUN][MAX_WKV_DIM];
    float removed[RUN][MAX_WKV_DIM], minus[RUN][MAX_WKV_DIM];  // n, and -rate n
    float bonus[RUN];                                          // sum of r k r_k
};

// One head in one piece.
class Walk {
public:
    Walk(const WkvArgs& args, const Piece& piece, int64_t head)
        : a(args), kept(args.rows, piece), piece(piece), head(head), from(head * args.dim),
          state(args.states + (piece.row * args.heads + head) * args.state_size()) {}

    void run(Tokens& tokens) {
        const int64_t end = piece.start + piece.count, size = a.rows.block_size;
        int64_t at = begin();
        while (at < end) {
            if (at >= piece.start && at % size == 0) open(at / size);
            const bool is_old = at < piece.start;
            const int64_t in_block = size - at % size, left = is_old ? piece.start - at : end - at;
            const int64_t most = in_block < left ? in_block : left, count = most < RUN ? most : RUN;
            for (int64_t i = 0; i < count; ++i) is_old ? recall(tokens, at + i, i) : receive(tokens, at + i, i);
            float* const out = is_old ? nullptr : a.out + (piece.first + at - piece.start) * a.width() + from;
            recur(tokens, count, out);
            for (int64_t i = 0; out && i < count; ++i) finish(tokens, i, out + i * a.width());
            at += count;
        }
    }

private:
    const WkvArgs& a;
    const Kept kept;
    const Piece& piece;
    const int64_t head, from;  // from: the head's first channel
    float* const state;

    size_t bytes() const { return static_cast<size_t>(a.state_size()) * sizeof *state; }

    // Sets `state` to where the walk begins, and returns the position.
    int64_t begin() const {
        if (piece.reached == piece.start && piece.start > 0) return piece.start;
        const int64_t first = piece.start > 0 ? kept.home * a.rows.block_size : 0;
        if (first == 0) std::memset(state, 0, bytes());
        else std::memcpy(state, kept.block(kept.home) + head * a.state_size(), bytes());
        return first;
    }

    void open(int64_t index) const { std::memcpy(kept.block(index) + head * a.state_size(), state, bytes()); }

    // Where a row has this head's w; its key, v and a are `width` floats apart.
    int64_t place() const { return a.rows.inputs - 4 * a.width() + from; }

    // A token of an earlier step: from the row that the block keeps.
    void recall(Tokens& to, int64_t token, int64_t i) const {
        const float* w = kept.before(token) + place();
        prepare(to, i, nullptr, w, w + a.width(), w + 2 * a.width(), w + 3 * a.width());
    }

    // A token of this step, which is also stored.
    void receive(Tokens& to, int64_t token, int64_t i) const {
        const int64_t row = (piece.first + token - piece.start) * a.width() + from;
        float* keep = kept.own(token) + place();
        const float* const inputs[] = {a.w, a.k, a.v, a.a};
        for (const float* x : inputs) {
            std::memcpy(keep, x + row, static_cast<size_t>(a.dim) * sizeof *x);
            keep += a.width();
        }
        prepare(to, i, a.r + row, a.w + row, a.k + row, a.v + row, a.a + row);
    }

    // r: null if no result is wanted.
    void prepare(Tokens& to, int64_t t, const float* r, const float* w, const float* k, const float* v,
                 const float* x) const {
        f32x16 square = broadcast(0.0f), bonus = broadcast(0.0f);
        for (int64_t i = 0; i < a.dim; i += LANES) {
            const int64_t rest = a.dim - i;
            const f32x16 rate = sigmoid(some(x + i, rest)), own = some(k + i, rest);
            const f32x16 key = fma(mul(own, sub(rate, broadcast(1.0f))), some(a.k_a + from + i, rest), own);
            const f32x16 read = r ? some(r + i, rest) : broadcast(0.0f);
            const f32x16 removed = mul(own, some(a.k_k + from + i, rest));
            square = fma(removed, removed, square);
            bonus = fma(mul(read, key), some(a.r_k + from + i, rest), bonus);
            store(to.decay[t] + i, exp(mul(sigmoid(some(w + i, rest)), broadcast(DECAY))));
            store(to.removed[t] + i, removed);
            store(to.minus[t] + i, sub(broadcast(0.0f), rate));
            store(to.k[t] + i, key);
            store(to.v[t] + i, some(v + i, rest));
            store(to.r[t] + i, read);
        }
        to.bonus[t] = sum(bonus);
        const float length = __builtin_sqrtf(sum(square));
        const f32x16 factor = broadcast(1.0f / (length < LEAST_LENGTH ? LEAST_LENGTH : length));  // NaN stays NaN
        for (int64_t i = 0; i < a.dim; i += LANES) {
            const f32x16 removed = mul(load(to.removed[t] + i), factor);
            store(to.removed[t] + i, removed);
            store(to.minus[t] + i, mul(load(to.minus[t] + i), removed));
        }
    }

    // Advances the state by `count` tokens. out: of the first one, null if none is wanted.
    void recur(const Tokens& tokens, int64_t count, float* out) {
        all_columns<MOST_VECTORS>(a.dim, [&](auto columns) {
            in_strip(columns, state, a.dim, a.dim, count, [&](float* first, int64_t stride) {
                walk(columns, tokens, count, out, first, stride);
            });
        });
    }

    // first: of these columns, whose rows are `stride` floats apart.
    template <int V, bool REST>
    void walk(Columns<V, REST> columns, const Tokens& tokens, int64_t count, float* out, float* first, int64_t stride) {
        const int64_t column = columns.column, rest = a.dim - column;
        const auto get = [&](const float* x) { return REST ? load_first(x, rest) : load(x); };
        const auto put = [&](float* to, f32x16 x) { REST ? store_first(to, x, rest) : store(to, x); };
        for (int64_t t = 0; t < count; ++t) {
            const float *k = tokens.k[t], *r = tokens.r[t], *removed = tokens.removed[t], *minus = tokens.minus[t];
            const float *decay = tokens.decay[t], *v_row = tokens.v[t] + column;
            f32x16 even[V], odd[V], known[V];
            const auto clear = [&] {
                for (int v = 0; v < V; ++v) even[v] = odd[v] = broadcast(0.0f);
            };
            const auto find = [&](int64_t i, f32x16* sums) {
                const f32x16 factor = broadcast(removed[i]);
                for (int v = 0; v < V; ++v) sums[v] = fma(get(first + i * stride + v * LANES), factor, sums[v]);
            };
            const auto update = [&](int64_t i, f32x16* sums) {
                const f32x16 write = broadcast(k[i]), remove = broadcast(minus[i]), fade = broadcast(decay[i]);
                const f32x16 read = broadcast(r[i]);
                for (int v = 0; v < V; ++v) {
                    float* at = first + i * stride + v * LANES;
                    const f32x16 left = fma(known[v], remove, mul(get(at), fade));
                    const f32x16 next = fma(load(v_row + v * LANES), write, left);
                    put(at, next);
                    sums[v] = fma(next, read, sums[v]);
                }
            };
            clear();
            in_pairs(a.dim, [&](int64_t i) { find(i, even); }, [&](int64_t i) { find(i, odd); });
            for (int v = 0; v < V; ++v) known[v] = add(even[v], odd[v]);
            clear();
            in_pairs(a.dim, [&](int64_t i) { update(i, even); }, [&](int64_t i) { update(i, odd); });
            if (!out) continue;
            for (int v = 0; v < V; ++v) put(out + t * a.width() + column + v * LANES, add(even[v], odd[v]));
        }
    }

    // The norm of a token's result, in place, and the bonus.
    void finish(const Tokens& tokens, int64_t t, float* out) const {
        const float count = static_cast<float>(a.dim);
        f32x16 total = broadcast(0.0f), square = broadcast(0.0f), mean = total, scale = broadcast(1.0f);
        if (a.weight) {
            for (int64_t i = 0; i < a.dim; i += LANES) total = add(total, some(out + i, a.dim - i));
            mean = broadcast(sum(total) / count);
            for (int64_t i = 0; i < a.dim; i += LANES) {
                const f32x16 centred = sub(some(out + i, a.dim - i), mean);
                const bool whole = a.dim - i >= LANES;
                const f32x16 real = whole ? centred : select(first_lanes(a.dim - i), centred, broadcast(0.0f));
                square = fma(real, real, square);
            }
            scale = broadcast(1.0f / __builtin_sqrtf(sum(square) / count + a.eps));
        }
        const f32x16 bonus = broadcast(tokens.bonus[t]);
        for (int64_t i = 0; i < a.dim; i += LANES) {
            const int64_t rest = a.dim - i;
            f32x16 x = some(out + i, rest);
            if (a.weight) {
                x = fma(mul(sub(x, mean), scale), some(a.weight + from + i, rest), some(a.bias + from + i, rest));
            }
            put_some(out + i, fma(bonus, load(tokens.v[t] + i), x), rest);
        }
    }
};

}  // namespace

void token_shift(const ShiftArgs& args, const Team& team) {
    const Range mine = share(team, (args.width + LANES - 1) / LANES);
    const int64_t first = mine.begin * LANES, end = mine.end * LANES < args.width ? mine.end * LANES : args.width;
    if (first >= end) return;
    for (int64_t i = 0; i < args.num_pieces; ++i) shift_piece(args, args.pieces[i], first, end - first);
}

void wkv(const WkvArgs& args, const Team& team) {
    Tokens tokens;
    each_head(team, args.pieces, args.num_pieces, args.heads,
              [&](const Piece& piece, int64_t head) { Walk(args, piece, head).run(tokens); });
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
