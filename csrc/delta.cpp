// The gated delta rule; see delta.h. A thread computes whole heads of v of whole pieces, so no sum is ever split, and
// lanes are columns of the state, so the instruction set changes no bit.
#include "delta.h"

#include "state_columns.h"

namespace kvasir {
namespace KVASIR_ISA {

void activate(int32_t, float*, const float*, int64_t);

namespace {

// A run of tokens of one head of v, ready for the recurrence.
struct Tokens {
    float q[RUN][MAX_DELTA_DIM], k[RUN][MAX_DELTA_DIM], v[RUN][MAX_DELTA_DIM];
    float beta[RUN], decay[RUN];
    // Of each row of the state, if they have decays of their own: the decay, and k times it.
    float decays[RUN][MAX_DELTA_DIM], fading[RUN][MAX_DELTA_DIM];
};

// One head of v in one piece.
class Walk {
public:
    Walk(const DeltaArgs& args, const Piece& piece, int64_t head)
        : a(args), piece(piece), head(head),
          qk_head(args.tiled ? head % args.qk_heads : head / (args.v_heads / args.qk_heads)),
          writes_qk(args.tiled ? head < args.qk_heads : head % (args.v_heads / args.qk_heads) == 0),
          table(piece.tables[args.group]),
          state(args.states + (piece.row * args.v_heads + head) * args.state_size()),
          home(piece.start > 0 ? (piece.start - 1) / args.block_size : 0) {}

    void run(Tokens& tokens) {
        const int64_t end = piece.start + piece.count;
        int64_t at = begin();
        while (at < end) {
            if (at >= piece.start && at % a.block_size == 0) open(at);
            const int64_t in_block = a.block_size - at % a.block_size, left = in_block < end - at ? in_block : end - at;
            // A run ends at the piece's start, so that tokens of earlier steps need no outputs.
            const int64_t old = at < piece.start ? piece.start - at : left;
            const int64_t count = left < RUN ? (left < old ? left : old) : (RUN < old ? RUN : old);
            prepare(tokens, at, count);
            if (at >= piece.start) keep(at, count);
            const int64_t row = piece.first + at - piece.start;
            float* out = at < piece.start ? nullptr : a.out + (row * a.v_heads + head) * a.v_dim;
            recur(tokens, count, out);
            at += count;
        }
    }

private:
    const DeltaArgs& a;
    const Piece& piece;
    const int64_t head, qk_head;
    const bool writes_qk;  // of the heads of v that share a q and a k, the first one stores them
    const int32_t* table;
    float* state;
    const int64_t home;  // the block of the token before the piece

    float* block(int64_t index) const { return a.blocks + table[index] * a.block_stride; }
    float* rows(int64_t index) const { return block(index) + a.v_heads * a.state_size(); }

    // The stored inputs of a token before the piece, null before the sequence.
    const float* stored(int64_t token) const {
        if (token < 0) return nullptr;
        return rows(home) + (token - home * a.block_size + a.taps - 1) * a.inputs();
    }

    // Sets `state` to where the walk begins, and returns the position.
    int64_t begin() const {
        const size_t bytes = static_cast<size_t>(a.state_size()) * sizeof *state;
        if (piece.reached == piece.start && piece.start > 0) return piece.start;
        const int64_t from = piece.start > 0 ? home * a.block_size : 0;
        if (from == 0) std::memset(state, 0, bytes);
        else std::memcpy(state, block(home) + head * a.state_size(), bytes);
        return from;
    }

    // This head's channels of a token's inputs, in the order of q, k and v.
    struct Part {
        int64_t channel, width, stride, from;
        const float* rows;  // of the step
    };
    void parts(Part (&found)[3]) const {
        const int64_t wide = int64_t{a.qk_heads} * a.dim, v_wide = int64_t{a.v_heads} * a.v_dim;
        found[0] = {qk_head * a.dim, a.dim, wide, qk_head * a.dim, a.q};
        found[1] = {wide + qk_head * a.dim, a.dim, wide, qk_head * a.dim, a.k};
        found[2] = {2 * wide + head * a.v_dim, a.v_dim, v_wide, head * a.v_dim, a.v};
    }

    // A part of a token's inputs, null before the sequence.
    const float* input(const Part& part, int64_t token) const {
        if (token >= piece.start) return part.rows + (piece.first + token - piece.start) * part.stride + part.from;
        const float* row = stored(token);
        return row ? row + part.channel : nullptr;
    }

    // The first token of a block: stores the state, and the inputs of the tokens before it.
    void open(int64_t at) const {
        const int64_t index = at / a.block_size, before = a.taps - 1;
        std::memcpy(block(index) + head * a.state_size(), state, static_cast<size_t>(a.state_size()) * sizeof *state);
        for (int64_t i = 0; i < before; ++i) store(rows(index) + i * a.inputs(), at - before + i);
    }

    void keep(int64_t at, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t token = at + i, index = token / a.block_size;
            store(rows(index) + (a.taps - 1 + token % a.block_size) * a.inputs(), token);
        }
    }

    void store(float* row, int64_t token) const {
        Part found[3];
        parts(found);
        for (int64_t i = writes_qk ? 0 : 2; i < 3; ++i) {
            const size_t bytes = static_cast<size_t>(found[i].width) * sizeof *row;
            const float* from = input(found[i], token);
            if (from) std::memcpy(row + found[i].channel, from, bytes);
            else std::memset(row + found[i].channel, 0, bytes);
        }
        row += a.channels();
        const float *b = gates(a.b, 0, 1, token), *x = gates(a.a, a.v_heads, a.decays, token);
        row[head] = b ? *b : 0.0f;
        for (int64_t i = 0; i < a.decays; ++i) row[a.v_heads + head * a.decays + i] = x ? x[i] : 0.0f;
    }

    // This head's b or a of a token, null before the sequence. offset: in the stored gates. count: numbers per head.
    const float* gates(const float* of_step, int64_t offset, int64_t count, int64_t token) const {
        const int64_t row = piece.first + token - piece.start;
        if (token >= piece.start) return of_step + (row * a.gate_stride + head) * count;
        const float* inputs = stored(token);
        return inputs ? inputs + a.channels() + offset + head * count : nullptr;
    }

    void prepare(Tokens& to, int64_t at, int64_t count) const {
        Part found[3];
        parts(found);
        for (int64_t i = 0; i < count; ++i) {
            convolve(found[0], at + i, to.q[i]);
            convolve(found[1], at + i, to.k[i]);
            convolve(found[2], at + i, to.v[i]);
            normalise(to.q[i], 1.0f / __builtin_sqrtf(static_cast<float>(a.dim)));
            normalise(to.k[i], 1.0f);
        }
        prepare_gates(to, at, count);
        if (a.decays > 1) prepare_decays(to, at, count);
    }

    // beta of each token of a run and, unless rows of the state have their own, the decay.
    void prepare_gates(Tokens& to, int64_t at, int64_t count) const {
        float b[RUN] = {}, x[RUN] = {};
        for (int64_t i = 0; i < count; ++i) {
            b[i] = *gates(a.b, 0, 1, at + i);
            x[i] = *gates(a.a, a.v_heads, a.decays, at + i);
        }
        const f32x16 one = broadcast(1.0f);
        store_all(to.beta, mul(broadcast(a.strength), div(one, add(one, exp(sub(broadcast(0.0f), load(b)))))));
        if (a.decays > 1) return;
        store_all(to.decay, decay(load(x), broadcast(a.log_rate[head]), broadcast(a.bias[head])));
    }
    static_assert(RUN == LANES, "the gates of a run are one vector");
    static KVASIR_INLINE void store_all(float* to, f32x16 x) { KVASIR_ISA::store(to, x); }

    void prepare_decays(Tokens& to, int64_t at, int64_t count) const {
        const float *log_rate = a.log_rate + head * a.decays, *bias = a.bias + head * a.decays;
        for (int64_t t = 0; t < count; ++t) {
            const float* x = gates(a.a, a.v_heads, a.decays, at + t);
            for (int64_t i = 0; i < a.dim; i += LANES) {
                const int64_t rest = a.dim - i;
                const f32x16 fade = decay(some(x + i, rest), some(log_rate + i, rest), some(bias + i, rest));
                KVASIR_ISA::store(to.decays[t] + i, fade);
                KVASIR_ISA::store(to.fading[t] + i, mul(load(to.k[t] + i), fade));
            }
        }
    }

    static KVASIR_INLINE f32x16 decay(f32x16 x, f32x16 log_rate, f32x16 bias) {
        return exp(sub(broadcast(0.0f), mul(exp(log_rate), softplus(add(x, bias)))));
    }

    // One token's part after the convolution: taps are added in ascending order, missing ones are zeros.
    void convolve(const Part& part, int64_t token, float* out) const {
        const float* taps[MAX_TAPS];
        for (int64_t t = 0; t < a.taps; ++t) taps[t] = input(part, token - (a.taps - 1) + t);
        for (int64_t i = 0; i < part.width; i += LANES) {
            const int64_t rest = part.width - i;
            f32x16 sum = broadcast(0.0f);
            for (int64_t t = 0; t < a.taps; ++t) {
                if (!taps[t]) continue;
                const float* weights = a.kernel + t * a.channels() + part.channel + i;
                sum = fma(some(taps[t] + i, rest), some(weights, rest), sum);
            }
            KVASIR_ISA::store(out + i, sum);
        }
        activate(a.function, out, out, part.width);
        for (int64_t i = part.width; i % LANES; ++i) out[i] = 0.0f;
    }

    void normalise(float* x, float factor) const {
        f32x16 total = broadcast(0.0f);
        for (int64_t i = 0; i < a.dim; i += LANES) total = fma(load(x + i), load(x + i), total);
        const f32x16 scale = broadcast(factor / __builtin_sqrtf(sum(total) + 1e-6f));
        for (int64_t i = 0; i < a.dim; i += LANES) KVASIR_ISA::store(x + i, mul(load(x + i), scale));
    }

    // Advances the state by `count` tokens. out: of the first one, null if none is wanted.
    void recur(const Tokens& tokens, int64_t count, float* out) {
        a.decays > 1 ? recur<true>(tokens, count, out) : recur<false>(tokens, count, out);
    }

    // EACH: every row of the state has its own decay.
    template <bool EACH>
    void recur(const Tokens& tokens, int64_t count, float* out) {
        all_columns<MOST_VECTORS>(a.v_dim, [&](auto columns) {
            in_strip(columns, state, a.dim, a.v_dim, count, [&](float* first, int64_t stride) {
                walk<EACH>(columns, tokens, count, out, first, stride);
            });
        });
    }

    // first: of these columns, whose rows are `stride` floats apart.
    template <bool EACH, int V, bool REST>
    void walk(Columns<V, REST> columns, const Tokens& tokens, int64_t count, float* out, float* first, int64_t stride) {
        const int64_t column = columns.column, e = a.v_dim, rest = e - column;
        const auto get = [&](const float* from) { return REST ? load_first(from, rest) : load(from); };
        const auto put = [&](float* to, f32x16 x) { REST ? store_first(to, x, rest) : KVASIR_ISA::store(to, x); };
        for (int64_t t = 0; t < count; ++t) {
            const float *k = tokens.k[t], *q = tokens.q[t], *fades = tokens.decays[t];
            const float* known_by = EACH ? tokens.fading[t] : k;
            const f32x16 whole = broadcast(EACH ? 1.0f : tokens.decay[t]), beta = broadcast(tokens.beta[t]);
            f32x16 even[V], odd[V], wanted[V];
            const auto clear = [&] {
                for (int v = 0; v < V; ++v) even[v] = odd[v] = broadcast(0.0f);
            };
            const auto predict = [&](int64_t i, f32x16* sums) {
                const f32x16 factor = broadcast(known_by[i]);
                for (int v = 0; v < V; ++v) sums[v] = fma(get(first + i * stride + v * LANES), factor, sums[v]);
            };
            const auto update = [&](int64_t i, f32x16* sums) {
                const f32x16 write = broadcast(k[i]), read = broadcast(q[i]);
                const f32x16 fade = EACH ? broadcast(fades[i]) : whole;
                for (int v = 0; v < V; ++v) {
                    float* at = first + i * stride + v * LANES;
                    const f32x16 next = fma(wanted[v], write, mul(get(at), fade));
                    put(at, next);
                    sums[v] = fma(next, read, sums[v]);
                }
            };
            clear();
            in_pairs(a.dim, [&](int64_t i) { predict(i, even); }, [&](int64_t i) { predict(i, odd); });
            for (int v = 0; v < V; ++v) {
                const f32x16 found = add(even[v], odd[v]), known = EACH ? found : mul(found, whole);
                wanted[v] = mul(sub(load(tokens.v[t] + column + v * LANES), known), beta);
            }
            clear();
            in_pairs(a.dim, [&](int64_t i) { update(i, even); }, [&](int64_t i) { update(i, odd); });
            if (!out) continue;
            for (int v = 0; v < V; ++v) put(out + t * a.v_heads * e + column + v * LANES, add(even[v], odd[v]));
        }
    }
};

}  // namespace

void gated_delta(const DeltaArgs& args, const Team& team) {
    Tokens tokens;
    each_head(team, args.pieces, args.num_pieces, args.v_heads,
              [&](const Piece& piece, int64_t head) { Walk(args, piece, head).run(tokens); });
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
