// Selective state spaces; see ssm.h. A thread computes whole channels or heads of whole pieces, so no sum is ever split,
// and lanes are channels, so the instruction set changes no bit.
#include "ssm.h"

#include "kept_inputs.h"
#include "kernels.h"
#include "state_columns.h"

namespace kvasir {
namespace KVASIR_ISA {

void activate(int32_t, float*, const float*, int64_t);

namespace {

// The channels [first, first + count) of one token: taps in ascending order, null for zeros.
void convolve(const ConvolutionArgs& a, const float* const* taps, int64_t first, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t rest = count - i;
        f32x16 sum = a.bias ? some(a.bias + first + i, rest) : broadcast(0.0f);
        for (int64_t t = 0; t < a.rows.taps; ++t) {
            if (!taps[t]) continue;
            sum = fma(some(taps[t] + first + i, rest), some(a.kernel + t * a.channels + first + i, rest), sum);
        }
        put_some(out + i, sum, rest);
    }
    activate(a.function, out, out, count);
}

// The channels [first, first + count) of a piece.
void convolve_piece(const ConvolutionArgs& a, const Piece& piece, int64_t first, int64_t count) {
    const Kept kept(a.rows, piece);
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    const auto input = [&](int64_t token) {
        if (token < piece.start) return kept.before(token);
        return static_cast<const float*>(a.x + (piece.first + token - piece.start) * a.channels);
    };
    const auto keep = [&](float* row, int64_t token) {
        if (const float* from = input(token)) std::memcpy(row + first, from + first, bytes);
        else std::memset(row + first, 0, bytes);
    };
    for (int64_t token = piece.start; token < piece.start + piece.count; ++token) {
        const int64_t index = token / a.rows.block_size;
        if (token % a.rows.block_size == 0) {
            for (int64_t t = token - a.rows.taps + 1; t < token; ++t) keep(kept.row(index, t), t);
        }
        keep(kept.own(token), token);
        const float* taps[MAX_SCAN_TAPS];
        for (int64_t t = 0; t < a.rows.taps; ++t) taps[t] = input(token - a.rows.taps + 1 + t);
        convolve(a, taps, first, count, a.out + (piece.first + token - piece.start) * a.channels + first);
    }
}

// A run of tokens of one head, ready for the recurrence.
struct Tokens {
    const float *b[RUN], *c[RUN];  // of this step's tokens, in their rows
    float old_b[RUN][MAX_SCAN_DIM];
    float x[RUN][MAX_SCAN_DIM], step[RUN][MAX_SCAN_DIM];  // Mamba 2 has the same step in all channels
    float decay[RUN];                                     // of Mamba 2
};

// One head in one piece.
class Walk {
public:
    Walk(const ScanArgs& args, const Piece& piece, int64_t head)
        : a(args), kept(args.conv.rows, piece), piece(piece), head(head),
          shared(head / (args.heads / args.groups) * args.dim),
          state(args.states + (piece.row * args.heads + head) * args.state_size()) {}

    void run(Tokens& tokens) {
        const int64_t end = piece.start + piece.count, size = a.conv.rows.block_size;
        int64_t at = begin();
        while (at < end) {
            if (at >= piece.start && at % size == 0) open(at / size);
            const bool is_old = at < piece.start;
            const int64_t in_block = size - at % size, left = is_old ? piece.start - at : end - at;
            const int64_t most = in_block < left ? in_block : left, count = most < RUN ? most : RUN;
            if (is_old) {
                recall(tokens, at, count);
            } else {
                receive(tokens, at, count);
            }
            prepare(tokens, count);
            const int64_t row = piece.first + at - piece.start;
            recur(tokens, count, is_old ? nullptr : a.out + row * a.inner() + head * a.width);
            at += count;
        }
    }

private:
    const ScanArgs& a;
    const Kept kept;
    const Piece& piece;
    const int64_t head, shared;  // shared: the first number of its group in B and C
    float* const state;

    size_t bytes() const { return static_cast<size_t>(a.state_size()) * sizeof *state; }

    // Sets `state` to where the walk begins, and returns the position.
    int64_t begin() const {
        if (piece.reached == piece.start && piece.start > 0) return piece.start;
        const int64_t from = piece.start > 0 ? kept.home * a.conv.rows.block_size : 0;
        if (from == 0) std::memset(state, 0, bytes());
        else std::memcpy(state, kept.block(kept.home) + head * a.state_size(), bytes());
        return from;
    }

    void open(int64_t index) const { std::memcpy(kept.block(index) + head * a.state_size(), state, bytes()); }

    // The head's numbers of dt: one or, in Mamba, one for each channel.
    int64_t first_step() const { return a.per_channel ? head * a.width : head; }
    int64_t num_steps() const { return a.per_channel ? a.width : 1; }

    // Tokens of earlier steps: from the rows that the block keeps.
    void recall(Tokens& to, int64_t at, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            const float* taps[MAX_SCAN_TAPS];
            const int64_t reach = a.conv.rows.taps - 1;
            for (int64_t t = 0; t <= reach; ++t) taps[t] = kept.before(at + i - reach + t);
            convolve(a.conv, taps, head * a.width, a.width, to.x[i]);
            const float* dt = taps[reach] + a.conv.channels;
            if (a.per_channel) {
                to.b[i] = dt + a.inner() + shared;
            } else {
                convolve(a.conv, taps, a.inner() + shared, a.dim, to.old_b[i]);
                to.b[i] = to.old_b[i];
            }
            to.c[i] = to.b[i];  // not read: there is no output
            std::memcpy(to.step[i], dt + first_step(), static_cast<size_t>(num_steps()) * sizeof *dt);
        }
    }

    // Tokens of this step, which are also stored.
    void receive(Tokens& to, int64_t at, int64_t count) const {
        const size_t size = static_cast<size_t>(num_steps()) * sizeof(float);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = piece.first + at + i - piece.start;
            const float *dt = a.dt + row * a.steps() + first_step(), *b = a.b + row * a.b_stride;
            float* keep = kept.own(at + i) + a.conv.channels;
            std::memcpy(keep + first_step(), dt, size);
            if (a.per_channel && head == 0) {
                std::memcpy(keep + a.inner(), b, static_cast<size_t>(a.groups * a.dim) * sizeof *b);
            }
            std::memcpy(to.x[i], a.conv.out + row * a.conv.channels + head * a.width,
                        static_cast<size_t>(a.width) * sizeof(float));
            std::memcpy(to.step[i], dt, size);
            to.b[i] = b + shared;
            to.c[i] = a.c + row * a.c_stride + shared;
        }
    }

    KVASIR_INLINE f32x16 limited(f32x16 dt) const {
        const f32x16 step = softplus(dt);
        const f32x16 within = min(max(step, broadcast(a.low)), broadcast(a.high));
        return select(unordered(step, step), step, within);
    }

    // From dt to the steps, and from these to the decays. Lanes after the head's channels are not read.
    void prepare(Tokens& to, int64_t count) const {
        if (a.per_channel) {
            for (int64_t i = 0; i < count; ++i) {
                for (int64_t p = 0; p < a.width; p += LANES) {
                    const int64_t rest = a.width - p;
                    const f32x16 dt = add(some(to.step[i] + p, rest), some(a.bias + head * a.width + p, rest));
                    store(to.step[i] + p, limited(dt));
                }
            }
            return;
        }
        float dt[RUN] = {};
        for (int64_t i = 0; i < count; ++i) dt[i] = to.step[i][0];
        const f32x16 steps = limited(add(load(dt), broadcast(a.bias[head])));
        store(to.decay, exp(mul(sub(broadcast(0.0f), broadcast(a.rates[head])), steps)));
        store(dt, steps);
        for (int64_t i = 0; i < count; ++i) {
            for (int64_t p = 0; p < a.width; p += LANES) store(to.step[i] + p, broadcast(dt[i]));
        }
    }
    static_assert(RUN == LANES, "the steps of a run are one vector");

    // Advances the state by `count` tokens. out: of the first one, null if none is wanted.
    void recur(const Tokens& tokens, int64_t count, float* out) {
        a.per_channel ? recur<1, true>(tokens, count, out) : recur<MOST_VECTORS, false>(tokens, count, out);
    }

    template <int MOST, bool CHANNELS>
    void recur(const Tokens& tokens, int64_t count, float* out) {
        const int64_t uses = CHANNELS ? 1 : count;  // Mamba, of few rows, works on its state in place
        all_columns<MOST>(a.width, [&](auto columns) {
            in_strip(columns, state, a.dim, a.width, uses, [&](float* first, int64_t stride) {
                walk<CHANNELS>(columns, tokens, count, out, first, stride);
            });
        });
    }

    // first: of these channels, whose rows are `stride` floats apart.
    template <bool CHANNELS, int V, bool REST>
    void walk(Columns<V, REST> columns, const Tokens& tokens, int64_t count, float* out, float* first, int64_t stride) {
        const int64_t column = columns.column, width = a.width, rest = width - column, inner = a.inner();
        const int64_t from = head * width + column;
        const auto get = [&](const float* x) { return REST ? load_first(x, rest) : load(x); };
        const auto put = [&](float* to, f32x16 x) { REST ? store_first(to, x, rest) : store(to, x); };
        const float* const rates = CHANNELS ? a.rates + from : nullptr;
        for (int64_t t = 0; t < count; ++t) {
            const float *b = tokens.b[t], *c = tokens.c[t];
            const f32x16 decay = broadcast(CHANNELS ? 0.0f : tokens.decay[t]), zero = broadcast(0.0f);
            f32x16 even[V], odd[V], x[V], write[V], minus[V];
            for (int v = 0; v < V; ++v) {
                const f32x16 step = get(tokens.step[t] + column + v * LANES);
                even[v] = odd[v] = zero;
                x[v] = get(tokens.x[t] + column + v * LANES);
                write[v] = mul(step, x[v]);
                minus[v] = sub(zero, step);
            }
            const auto update = [&](int64_t i, f32x16* sums) {
                const f32x16 factor = broadcast(b[i]), read = broadcast(c[i]);
                for (int v = 0; v < V; ++v) {
                    float* at = first + i * stride + v * LANES;
                    const f32x16 kept_share = CHANNELS ? exp(mul(get(rates + i * inner + v * LANES), minus[v])) : decay;
                    const f32x16 next = fma(write[v], factor, mul(get(at), kept_share));
                    put(at, next);
                    sums[v] = fma(next, read, sums[v]);
                }
            };
            in_pairs(a.dim, [&](int64_t i) { update(i, even); }, [&](int64_t i) { update(i, odd); });
            if (!out) continue;
            for (int v = 0; v < V; ++v) {
                const f32x16 skip = CHANNELS ? get(a.skip + from + v * LANES) : broadcast(a.skip[head]);
                put(out + t * inner + column + v * LANES, fma(skip, x[v], add(even[v], odd[v])));
            }
        }
    }
};

}  // namespace

void causal_convolution(const ConvolutionArgs& args, const Team& team) {
    const Range mine = share(team, (args.channels + LANES - 1) / LANES);
    const int64_t first = mine.begin * LANES, end = mine.end * LANES < args.channels ? mine.end * LANES : args.channels;
    if (first >= end) return;
    for (int64_t i = 0; i < args.num_pieces; ++i) convolve_piece(args, args.pieces[i], first, end - first);
}

void selective_scan(const ScanArgs& args, const Team& team) {
    Tokens tokens;
    each_head(team, args.conv.pieces, args.conv.num_pieces, args.heads,
              [&](const Piece& piece, int64_t head) { Walk(args, piece, head).run(tokens); });
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
