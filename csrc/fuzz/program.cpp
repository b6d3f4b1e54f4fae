// Fuzzes small programs and steps with valid and invalid pieces. The results of a step must not depend on the
// instruction set or the threads, ids sampled along a draft must be those of steps without one, and an invalid step must
// be rejected.
#include <algorithm>

#include "../pool.h"
#include "../tests/programs.h"
#include "input.h"

KVASIR_API int32_t kvasir_program_run(kvasir::Program* program, void* pool, const kvasir::Piece* pieces,
                                      int64_t num_pieces);

namespace {

using namespace kvasir_fuzz;
using namespace kvasir;
using kvasir_test::Builder;
using kvasir_test::Numbers;

constexpr int64_t VOCAB = 50, ROWS = 3, MAX_IDS = 40, GROUPS = Builder::GROUPS, TABLE = (MAX_IDS + 15) / 16;

// Builds a decoder whose layers the input chooses. `in` is a copy, so that every session builds the same layers.
void build(Builder& b, Input in) {
    const Numbers numbers = in.one_of({kvasir_test::FLOAT, kvasir_test::PAIRS, kvasir_test::BYTES});
    const int64_t width = 32, dim = 2 * in.one_of({1, 4, 5, 8}), kv_heads = in.between(1, 2);
    const int64_t heads = kv_heads * in.between(1, 3), inner = 32 * in.between(1, 2);
    const Numbers plain = {FORMAT_F32, ACT_F32, numbers.cache};
    const bool adapted = in.flag();
    float* x = b.embed(numbers, width, VOCAB, false);
    for (int64_t layer = in.between(0, 2); layer > 0; --layer) {
        float* n = in.flag() ? b.rms_norm(x, width) : b.layer_norm(x, width, in.one_of({1, 2, 4}));
        if (in.flag()) {
            float *q = b.rows(heads * dim), *k = b.rows(kv_heads * dim), *v = b.rows(kv_heads * dim);
            float* mixed = b.rows(heads * dim);
            b.linear(n, {{b.matrices(numbers, heads * dim, width), b.vector(heads * dim), q, nullptr, adapted},
                         {b.matrices(plain, kv_heads * dim, width), nullptr, k, nullptr},
                         {b.matrices(numbers, kv_heads * dim, width), nullptr, v, nullptr, adapted}});
            if (in.flag()) b.rope(q, heads, dim, in.between(1, dim / 2), MAX_IDS);
            b.attention(numbers, mixed, q, k, v, heads, kv_heads, dim, in.between(0, GROUPS - 1));
            b.linear(mixed, {{b.matrices(plain, width, heads * dim, in.one_of({1, 2})), nullptr, x, x, adapted}});
        } else {
            float *gate = b.rows(inner), *up = b.rows(inner);
            b.linear(n, {{b.matrices(numbers, inner, width), nullptr, gate, nullptr, adapted},
                         {b.matrices(plain, inner, width), b.vector(inner), up, nullptr}});
            b.add(OP_GATED, {gate, gate, up}, {inner, in.between(FUNCTION_NONE, FUNCTION_EXP)});
            b.linear(gate, {{b.matrices(numbers, width, inner), nullptr, x, x}});
        }
        if (in.flag()) b.add(OP_SOFTCAP, {x, x}, {width}, 3.0f);
        if (in.flag()) b.add(OP_SCALE, {x, x}, {width}, 0.5f);
        if (in.flag()) b.add(OP_CLAMP, {x, x}, {width}, -2.0f).f[1] = 3.0f;
        if (in.flag()) b.add(OP_XIELU, {x, x, b.vector(4, 0.5f)}, {width});
    }
    b.head(numbers, b.rms_norm(x, width), width, VOCAB, adapted);
}

// A program with its sequences, whose ids come from the input.
class Session {
  public:
    Session(Input shape, Input in, int32_t threads) : b(threads), pool_(pool_create(threads, false)) {
        build(b, shape);
        p = b.program();
        for (int64_t i = 0; i < ROWS; ++i) join(i, in);
    }
    ~Session() { pool_destroy(pool_); }
    Session(const Session&) = delete;

    // Runs steps. Returns the error code of each and, for successful ones, hidden rows and ids.
    std::vector<float> run(Input in) {
        std::vector<float> found;
        for (int64_t steps = in.between(1, 4); steps > 0; --steps) {
            const int64_t count = in.between(0, Builder::MAX_ROWS + 1);
            Guarded<Piece> pieces(count);
            for (int64_t i = 0; i < count; ++i) pieces[i] = piece(in, i);
            b.memory.poison();
            const int32_t error = kvasir_program_run(&p, pool_, pieces.data, count);
            found.push_back(static_cast<float>(error));
            require(error >= RUN_OK && error <= RUN_BAD_ADAPTER, "a known error");
            if (error) continue;
            int64_t rows = 0;
            for (int64_t i = 0; i < count; ++i) rows += pieces[i].count;
            found.insert(found.end(), b.hidden, b.hidden + rows * b.hidden_width);
            for (int64_t i = 0; i < ROWS; ++i) found.insert(found.end(), p.states[i].ids, p.states[i].ids + MAX_IDS);
            int64_t sampled = 0;
            for (int64_t i = 0; i < count; ++i) sampled += pieces[i].flags & PIECE_SAMPLE ? 1 + pieces[i].drafted : 0;
            for (int64_t i = 0; i < sampled; ++i) found.push_back(static_cast<float>(p.results[i].token));
            check_draft(pieces.data, count);
        }
        return found;
    }

  private:
    // The ids that the last step sampled along its first draft, each compared with that of a step of the ids before it.
    void check_draft(const Piece* pieces, int64_t count) {
        int64_t first = 0;
        const Piece* drafted = std::find_if(pieces, pieces + count, [&](const Piece& piece) {
            if (piece.flags & PIECE_SAMPLE && piece.drafted) return true;
            first += piece.flags & PIECE_SAMPLE ? 1 : 0;
            return false;
        });
        if (!own_blocks_ || drafted == pieces + count || !drafted->causal()) return;
        const std::vector<Sampled> found(p.results + first, p.results + first + 1 + drafted->drafted);
        int32_t* ids = p.states[drafted->row].ids;
        const std::vector<int32_t> before(ids, ids + MAX_IDS);
        for (int64_t i = 0; i <= drafted->drafted; ++i) {
            const Piece alone = {drafted->row, PIECE_SAMPLE, drafted->start, drafted->count - drafted->drafted + i};
            b.memory.poison();
            require(kvasir_program_run(&p, pool_, &alone, 1) == RUN_OK, "program: a part of a valid piece is valid");
            require(p.results[0].token == found[static_cast<size_t>(i)].token,
                    "program: an id sampled along a draft is that of a step without one");
            std::copy(before.begin(), before.end(), ids);
        }
    }
    // Usually a different row for each piece and values near the valid range; occasionally arbitrary values.
    Piece piece(Input& in, int64_t i) {
        Piece piece{};
        piece.row = static_cast<int32_t>(i % ROWS);
        piece.flags = static_cast<int32_t>(in.between(0, 7));
        piece.start = in.between(0, MAX_IDS);
        piece.count = in.between(0, 20);
        piece.drafted = in.between(0, 2) * in.between(0, 4);
        if (i >= ROWS) piece.row = in.one_of({-1, 3, 1 << 30});
        if (in.byte() % 16 == 15) piece.start = in.any<int64_t>();
        if (in.byte() % 16 == 15) piece.count = in.any<int64_t>();
        if (in.byte() % 16 == 15) piece.drafted = in.any<int64_t>();
        return piece;
    }
    void join(int64_t i, Input& in) {
        RowState& state = p.states[i];
        state = {};
        state.ids = b.memory.keep<int32_t>(MAX_IDS);
        for (int64_t t = 0; t < MAX_IDS; ++t) state.ids[t] = static_cast<int32_t>((7 * t + in.byte()) % VOCAB);
        state.max_ids = MAX_IDS;
        state.table_blocks = in.byte() % 8 == 7 ? in.between(0, TABLE) : TABLE;
        for (int64_t g = 0; g < GROUPS; ++g) {
            int32_t* table = b.memory.keep<int32_t>(TABLE);
            for (int64_t j = 0; j < TABLE; ++j) table[j] = static_cast<int32_t>(1 + i + ROWS * j);
            if (in.byte() % 16 == 15) {
                table[in.between(0, TABLE - 1)] = in.any<int32_t>();
                own_blocks_ = false;
            }
            state.tables[g] = table;
        }
        if (in.flag()) adapt(state, in);
        state.spec.temperature = in.one_of({0.0, 0.7, 1.5});
        state.spec.top_p = in.one_of({1.0, 0.9});
        state.spec.top_k = in.one_of({0, 5});
        state.spec.repetition_penalty = in.one_of({1.0f, 1.3f});
        state.spec.typical_p = in.one_of({1.0, 0.9});
        state.spec.adaptive_target = -1.0;
        state.spec.repetition_last_n = -1;
        state.spec.dry_multiplier = in.one_of({0.0, 0.8});
        state.spec.dry_base = 1.75;
        state.spec.dry_penalty_last_n = -1;
        state.spec.seed = in.byte();
        state.spec.prompt_len = 0;
        state.spec.logprobs = -1;
    }

    // Usually adapters that exist, rarely arbitrary numbers.
    static void adapt(RowState& state, Input& in) {
        state.num_adapters = in.between(0, MAX_APPLIED);
        for (int64_t i = 0; i < state.num_adapters; ++i) {
            Applied& adapter = state.adapters[i];
            adapter = {in.between(1, 2), in.between(0, 2) * in.between(0, 20), in.one_of({1.0f, 0.5f, -2.0f}), 0};
            if (in.byte() % 32 == 31) adapter.id = in.any<int64_t>();
            if (in.byte() % 32 == 31) adapter.start = in.any<int64_t>();
        }
        if (in.byte() % 32 == 31) state.num_adapters = in.any<int64_t>();
    }

    Builder b;
    Program p = {};
    Pool* pool_;
    bool own_blocks_ = true;  // no two positions share a slot
};

}  // namespace

void fuzz_program(const uint8_t* data, size_t size) {
    const size_t shape = std::min<size_t>(size, 24), rows = std::min<size_t>(size, shape + 150);
    const int32_t threads = size ? 2 + data[size - 1] % 2 : 2;
    const Input first(data, shape), second(data + shape, rows - shape), third(data + rows, size - rows);
    on_all(
        [&] {
            Session alone(first, second, 1), team(first, second, threads);
            const std::vector<float> found = alone.run(third), other = team.run(third);
            const auto values = static_cast<int64_t>(found.size());
            require(found.size() == other.size() && same(found.data(), other.data(), values),
                    "program: the bits do not depend on the threads");
            return found;
        },
        "program: all instruction sets give the same bits");
}
