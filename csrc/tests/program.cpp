// Tests whole programs: against a float64 interpreter, and that the bits of every row and every sampled token do not
// depend on threads, steps or the instruction set. Invalid steps must be rejected without computing anything.
#include "../pool.h"
#include "cases.h"

KVASIR_API int32_t kvasir_program_run(kvasir::Program* program, void* pool, const kvasir::Piece* pieces,
                                      int64_t num_pieces);
KVASIR_API int64_t kvasir_program_progress(const kvasir::Program* program);
KVASIR_API int32_t kvasir_program_logits(kvasir::Program* program, void* pool, const int64_t* rows, int64_t count);
KVASIR_API void kvasir_sample(kvasir::SampleArgs* args, void* pool);

namespace {

using namespace kvasir_test;

// ---- sessions ----

// A sequence and its results so far: rows of hidden states and logits, by position.
struct Sequence {
    int64_t prompt, known, computed;
    int32_t *ids, *tables[GROUPS];
    std::vector<float> hidden, logits;
};

class Session {
  public:
    // apart: the caller is not a thread of the pool
    Session(const Case& c, int32_t threads, bool apart = false)
        : b(threads), pool_(pool_create(threads, false, apart)) {
        c.build(b, c.numbers);
        p = b.program();
        p.nanoseconds = b.memory.keep<uint64_t>(p.count + 1);
        for (int64_t i = 0; i < SEQUENCES; ++i) join(i);
    }
    ~Session() { pool_destroy(pool_); }
    Session(const Session&) = delete;

    int32_t run(const Piece* pieces, int64_t count) { return kvasir_program_run(&p, pool_, pieces, count); }
    int32_t logits(const int64_t* rows, int64_t count) { return kvasir_program_logits(&p, pool_, rows, count); }

    // The uncomputed tokens of a sequence, at most max_tokens. Samples a token if they include the last known one.
    Piece piece(int64_t row, int64_t max_tokens) const {
        const Sequence& s = sequences[row];
        const int64_t count = std::min(s.known - s.computed, max_tokens);
        const bool samples = s.computed + count == s.known;
        return {static_cast<int32_t>(row), samples ? PIECE_SAMPLE : 0, s.computed, count};
    }
    bool finished(int64_t row) const { return sequences[row].known == sequences[row].prompt + ANSWER; }

    // Adds a draft of `count` ids to a piece that samples: those of another session, some of them wrong.
    void draft(Piece& piece, const Session& other, int64_t count, std::mt19937& random) {
        Sequence& s = sequences[piece.row];
        for (int64_t i = s.known; i < s.known + count; ++i) {
            const int32_t right = other.sequences[piece.row].ids[i];
            s.ids[i] = random() % 4 ? right : static_cast<int32_t>((right + 1) % VOCAB);
        }
        piece.count += count;
        piece.drafted = count;
    }

    void step(const std::vector<Piece>& pieces) {
        b.memory.poison();
        for (const Piece& piece : pieces) drop_blocks_before_window(piece);
        require(run(pieces.data(), static_cast<int64_t>(pieces.size())) == RUN_OK, "a step runs");
        require(kvasir_program_progress(&p) == p.chosen_from, "all instructions over token rows are complete");
        const std::vector<Sampled> results(p.results, p.results + Builder::MAX_SAMPLED);
        const Sampled* found = results.data();
        int64_t row = 0;
        for (const Piece& piece : pieces) {
            Sequence& s = sequences[piece.row];
            const int64_t accepted = piece.flags & PIECE_SAMPLE ? take(s, piece, found) : 0;
            const int64_t kept = piece.count - piece.drafted + accepted;
            const float* hidden = b.hidden + row * b.hidden_width;
            s.hidden.insert(s.hidden.end(), hidden, hidden + kept * b.hidden_width);
            s.computed += kept;
            read_logits(s, row, kept);
            row += piece.count;
            if (!(piece.flags & PIECE_SAMPLE)) continue;
            for (int64_t i = 0; i <= accepted; ++i) check_sampled(piece, s.computed - accepted + i, found[i]);
            found += 1 + piece.drafted;
        }
    }

    Builder b;
    Program p = {};
    Sequence sequences[SEQUENCES];

  private:
    void join(int64_t i) {
        Sequence& s = sequences[i];
        s.prompt = s.known = PROMPTS[i];
        s.computed = 0;
        const int64_t length = s.prompt + ANSWER, blocks = (length + Builder::BLOCK - 1) / Builder::BLOCK;
        s.ids = b.memory.keep<int32_t>(length);
        for (int64_t t = 0; t < s.prompt; ++t) s.ids[t] = static_cast<int32_t>((7 * t * t + 3 * t + 11 * i) % VOCAB);
        RowState& state = p.states[i];
        state = {};
        state.ids = s.ids;
        state.max_ids = length;
        state.table_blocks = blocks;
        if (b.adapters) adapt(state, i);
        for (int64_t g = 0; g < GROUPS; ++g) {
            state.tables[g] = s.tables[g] = b.memory.keep<int32_t>(blocks);
            for (int64_t j = 0; j < blocks; ++j) s.tables[g][j] = static_cast<int32_t>(1 + i + SEQUENCES * j);
        }
        SampleRow& spec = state.spec;
        spec.temperature = i == 0 ? 0.0 : 0.5 + 0.5 * static_cast<double>(i);
        spec.top_p = i == 2 ? 0.9 : 1.0;
        spec.top_k = i == 3 ? 40 : 0;
        spec.typical_p = i == 1 ? 0.9 : 1.0;
        spec.adaptive_target = -1.0;
        spec.repetition_penalty = i == 4 ? 1.3f : 1.0f;
        spec.repetition_last_n = -1;
        spec.dry_multiplier = i == 3 || i == 1 ? 4.0 : 0.0;
        spec.dry_base = 2.0;
        spec.dry_penalty_last_n = -1;
        spec.seed = 100 + static_cast<uint64_t>(i);
        spec.prompt_len = s.prompt;
        spec.logprobs = static_cast<int32_t>(i) - 1;
    }

    // None, one, several with scales, and some that apply from a position within the prompt or the answer on.
    static void adapt(RowState& state, int64_t i) {
        const Applied one = {1, 0, 1.0f, 0}, two = {2, 0, 1.0f, 0}, late = {1, 7, -0.5f, 0}, later = {2, 19, 0.75f, 0};
        const std::vector<Applied> all[] = {{later, one}, {two, late}, {one}, {}, {late, two, late}};
        std::copy(all[i].begin(), all[i].end(), state.adapters);
        state.num_adapters = static_cast<int64_t>(all[i].size());
    }

    // Invalidates the table entries of blocks that are entirely outside of the window.
    void drop_blocks_before_window(const Piece& piece) {
        const int64_t window_start = piece.start - b.windows[1] + 1;
        for (int64_t j = 0; (j + 1) * Builder::BLOCK <= window_start; ++j) sequences[piece.row].tables[1][j] = -7;
    }

    void read_logits(Sequence& s, int64_t first, int64_t count) {
        for (int64_t at = 0; at < count; at += p.max_chosen) {
            const int64_t rows[] = {first + at, first + at + 1}, some = std::min(p.max_chosen, count - at);
            require(logits(rows, some) == RUN_OK, "logits of the last run");
            s.logits.insert(s.logits.end(), b.logits, b.logits + some * b.vocab);
        }
    }

    // Takes the results up to the first that differs from the draft; returns how many drafted ids they match.
    static int64_t take(Sequence& s, const Piece& piece, const Sampled* found) {
        int64_t accepted = 0;
        while (accepted < piece.drafted && found[accepted].token == s.ids[s.known + accepted]) ++accepted;
        s.known += accepted;
        if (piece.drafted) s.ids[s.known] = found[accepted].token;
        ++s.known;
        return accepted;
    }

    // Runs the sampler alone on the logits of the position before, and compares the results.
    void check_sampled(const Piece& piece, int64_t position, const Sampled& found) {
        Sequence& s = sequences[piece.row];
        SampleRow spec = p.states[piece.row].spec;
        spec.position = spec.num_ids = position;
        spec.ids = s.ids;
        Sampled alone = {};
        std::vector<int32_t> room(Builder::MAX_IDS);
        std::vector<uint64_t> scratch(static_cast<size_t>(kvasir_sample_scratch(VOCAB)) / 8);
        SampleArgs args = {&s.logits[static_cast<size_t>((position - 1) * VOCAB)], VOCAB, VOCAB, 1, &spec, &alone,
                           reinterpret_cast<uint8_t*>(scratch.data()), room.data(), Builder::MAX_IDS};
        kvasir_sample(&args, nullptr);
        require(found.error == SAMPLE_OK && found.token == alone.token, "the sampled token matches the row's logits");
        require(s.ids[position] == found.token, "a sampled token is appended to the sequence");
        if (spec.logprobs < 0) return;
        require(same(&found.logprob, &alone.logprob, 1) && found.rank == alone.rank,
                "the log-probability matches the row's logits");
    }

    Pool* pool_;
};

void one_by_one(Session& session) {
    for (int64_t i = 0; i < SEQUENCES; ++i) {
        while (!session.finished(i)) session.step({session.piece(i, Builder::MAX_TOKENS)});
    }
}

// Steps of many sequences, in random order and in pieces of up to max_tokens tokens; with drafts of up to max_drafted
// ids of another session.
void together(Session& session, int64_t max_tokens, int64_t max_drafted, const Session& other, std::mt19937& random) {
    while (true) {
        std::vector<int64_t> open;
        for (int64_t i = 0; i < SEQUENCES; ++i) {
            if (!session.finished(i)) open.push_back(i);
        }
        if (open.empty()) return;
        std::shuffle(open.begin(), open.end(), random);
        std::vector<Piece> pieces;
        int64_t room = Builder::MAX_TOKENS;
        for (const int64_t i : open) {
            const auto size = static_cast<int64_t>(random() % static_cast<uint64_t>(max_tokens));
            const int64_t count = std::min(room, 1 + size);
            if (count == 0 || (random() % 5 == 0 && !pieces.empty())) continue;
            Piece piece = session.piece(i, count);
            if (piece.flags & PIECE_SAMPLE) {
                const Sequence& s = session.sequences[i];
                const int64_t most = std::min({max_drafted, s.prompt + ANSWER - 1 - s.known, room - piece.count});
                session.draft(piece, other, static_cast<int64_t>(random()) % (most + 1), random);
            }
            pieces.push_back(piece);
            room -= piece.count;
        }
        session.step(pieces);
    }
}

// ---- checks ----

void require_near(const std::vector<double>& expected, const std::vector<float>& found, double tolerance,
                  const char* name) {
    double max_value = 0, error = 0;
    for (size_t i = 0; i < found.size(); ++i) {
        max_value = std::max(max_value, std::fabs(expected[i]));
        error = std::max(error, std::isfinite(found[i]) ? std::fabs(found[i] - expected[i]) : INFINITY);
    }
    if (!(error < tolerance * max_value)) std::fprintf(stderr, "%s: off by %g of %g\n", name, error, max_value);
    require(error < tolerance * max_value, "a program agrees with float64");
}

void require_same(const Session& a, const Session& b, const char* what) {
    for (int64_t i = 0; i < SEQUENCES; ++i) {
        const Sequence &s = a.sequences[i], &t = b.sequences[i];
        require(std::equal(s.ids, s.ids + s.known, t.ids), what);
        require(s.hidden.size() == t.hidden.size() && s.logits.size() == t.logits.size(), what);
        require(same(s.hidden.data(), t.hidden.data(), static_cast<int64_t>(s.hidden.size())), what);
        require(same(s.logits.data(), t.logits.data(), static_cast<int64_t>(s.logits.size())), what);
    }
}

void require_unowned(const Session& session) {
    for (const Builder::Cache& cache : session.b.caches) {
        for (int64_t i = 0; i < cache.block_bytes; ++i) {
            require(cache.blocks[i] == POISON, "an unallocated block is not written");
        }
    }
}

// The sessions of the first instruction set, one for each case.
std::vector<std::unique_ptr<Session>> first_sessions;

void check(const Case& c, size_t place, std::mt19937& random) {
    std::unique_ptr<Session> alone = std::make_unique<Session>(c, 1);
    one_by_one(*alone);
    for (int64_t i = 0; i < SEQUENCES; ++i) {
        const Sequence& s = alone->sequences[i];
        Plain plain(alone->b, s.ids, s.computed, true, &alone->p.states[i]);
        require_near(plain.hidden(), s.hidden, c.tolerance, c.name);
        require_near(plain.logits(), s.logits, c.tolerance, c.name);
    }
    for (const int32_t threads : {1, 2, 3}) {
        for (const int64_t max_tokens : {3, 40}) {
            Session session(c, threads, max_tokens == 3);
            together(session, max_tokens, max_tokens == 3 ? 4 : threads - 1, *alone, random);
            require_same(session, *alone, "the bits do not depend on threads, steps and drafts");
            require_unowned(session);
        }
    }
    if (place == first_sessions.size()) {
        first_sessions.push_back(std::move(alone));
    } else {
        require_same(*first_sessions[place], *alone, "all instruction sets give the same bits");
    }
}

// Bidirectional attention: two whole sequences in one step.
void check_bidirectional(const Case& c) {
    Session session(c, 2);
    const Piece pieces[] = {{4, PIECE_BIDIRECTIONAL, 0, 5}, {1, PIECE_BIDIRECTIONAL, 0, 17}};
    require(session.run(pieces, 2) == RUN_OK, "a bidirectional step runs");
    const float* from = session.b.hidden;
    for (const Piece& piece : pieces) {
        Plain plain(session.b, session.sequences[piece.row].ids, piece.count, false);
        const std::vector<float> found(from, from + piece.count * WIDTH);
        require_near(plain.hidden(), found, c.tolerance, c.name);
        from += piece.count * WIDTH;
    }
}

// The logits of a piece that does not sample stay in the buffer, after those of all that do.
void check_kept_logits() {
    Session session(CASES[0], 2);
    const Piece kept = {0, PIECE_LOGITS, 0, 20, 1}, sampled = {1, PIECE_SAMPLE, 0, 10};
    const int64_t rows[] = {18, 19}, width = session.b.vocab;
    require(session.run(&kept, 1) == RUN_OK, "a step runs");
    std::vector<float> found(session.b.logits, session.b.logits + 2 * width);
    require(session.logits(rows, 2) == RUN_OK && same(found.data(), session.b.logits, 2 * width),
            "the logits of the last row and of the draft are kept");
    const Piece last = {0, PIECE_LOGITS, 0, 20}, both[] = {last, sampled};
    require(session.run(both, 2) == RUN_OK, "a step runs");
    require(same(&found[static_cast<size_t>(width)], session.b.logits + width, width),
            "the kept logits follow those of the sampled pieces");
}

void check_calls() {
    Session session(CASES[2], 3);
    session.step({session.piece(0, 30), session.piece(1, 10)});
    session.step({session.piece(0, 3)});
    for (const Instr& in : session.b.instrs) {
        if (in.op == OP_CALL) require(static_cast<const Call*>(in.p[1])->calls == 2, "one call for each step");
    }
}

// ---- invalid steps ----

void require_refused(Session& session, std::vector<Piece> pieces, int32_t error, const char* what) {
    session.b.memory.poison();
    const std::vector<uint8_t> before = session.b.memory.copy();
    Guarded<Piece> exact(static_cast<int64_t>(pieces.size()));
    std::copy(pieces.begin(), pieces.end(), exact.data);
    const int32_t found = session.run(exact.data, static_cast<int64_t>(pieces.size()));
    if (found != error) std::fprintf(stderr, "%s: %d\n", what, found);
    require(found == error, "an invalid step is rejected with the right error");
    Program& p = session.p;  // the gather may have written to these buffers
    std::memset(p.tokens, POISON, static_cast<size_t>(p.max_tokens) * sizeof *p.tokens);
    std::memset(p.positions, POISON, static_cast<size_t>(p.max_tokens) * sizeof *p.positions);
    std::memset(static_cast<void*>(p.pieces), POISON, static_cast<size_t>(p.max_rows) * sizeof *p.pieces);
    std::memset(p.chosen, POISON, static_cast<size_t>(p.max_sampled) * sizeof *p.chosen);
    std::memset(p.sampler_rows, POISON, static_cast<size_t>(p.max_sampled) * sizeof *p.sampler_rows);
    std::memset(static_cast<void*>(p.specs), POISON, static_cast<size_t>(p.max_sampled) * sizeof *p.specs);
    for (int64_t g = 0; g < GROUPS; ++g) {
        std::memset(p.slots[g], POISON, static_cast<size_t>(p.max_tokens) * sizeof *p.slots[g]);
    }
    require(session.b.memory.copy() == before, "a rejected step computes nothing");
}

void check_refused_adapters() {
    const auto adapted = [](const Case& c) { return c.build == adapted_decoder; };
    Session session(*std::find_if(std::begin(CASES), std::end(CASES), adapted), 2);
    RowState& state = session.p.states[0];
    const Piece piece = {0, 0, 0, 1};
    for (const int64_t adapter : {int64_t{3}, int64_t{0}, Builder::ADAPTERS, int64_t{-1}}) {
        state.adapters[0] = {1, 0, 1.0f, 0};
        state.adapters[1] = {adapter, 100, 1.0f, 0};
        state.num_adapters = 2;
        require(session.run(&piece, 1) == RUN_BAD_ADAPTER, "an unknown adapter is rejected");
    }
    for (const int64_t count : {MAX_APPLIED + 1, int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
        state.num_adapters = count;
        require(session.run(&piece, 1) == RUN_BAD_ADAPTER, "too many adapters are rejected");
    }
}

void check_refusals() {
    constexpr int64_t HIGHEST = std::numeric_limits<int64_t>::max(), LOWEST = std::numeric_limits<int64_t>::min();
    constexpr int64_t ROWS = Builder::MAX_TOKENS;
    Session session(CASES[0], 2);
    RowState* states = session.p.states;
    const Piece good = {1, PIECE_SAMPLE, 0, 17};
    const auto refused = [&](std::vector<Piece> pieces, int32_t error, const char* what) {
        require_refused(session, pieces, error, what);
        if (pieces.size() > 1) return;
        pieces.insert(pieces.begin(), good);
        require_refused(session, pieces, error, what);
    };
    require(session.run(nullptr, Builder::MAX_ROWS + 1) == RUN_TOO_MANY, "too many pieces");
    require(session.run(nullptr, 0) == RUN_OK, "an empty step runs");
    refused({{0, 0, 0, ROWS + 1}}, RUN_TOO_MANY, "too many rows");
    refused({{0, 0, 0, HIGHEST}}, RUN_TOO_MANY, "far too many rows");
    refused({{0, 0, 0, 30}, {1, 0, 0, 11}}, RUN_TOO_MANY, "too many rows in all pieces");
    for (const int32_t row : {-1, static_cast<int32_t>(SEQUENCES), std::numeric_limits<int32_t>::max(),
                              std::numeric_limits<int32_t>::min()}) {
        refused({{row, 0, 0, 1}}, RUN_BAD_WORK, "a row out of range");
    }
    for (const int64_t count : {int64_t{0}, int64_t{-1}, LOWEST}) {
        refused({{0, 0, 0, count}}, RUN_BAD_WORK, "no tokens");
        refused({{0, 0, HIGHEST, count}}, RUN_BAD_WORK, "no tokens, start too large");
        refused({{0, 0, -1, count}}, RUN_BAD_WORK, "no tokens, start negative");
    }
    for (const int64_t start : {int64_t{-1}, int64_t{39}, int64_t{1000}, HIGHEST, LOWEST}) {
        refused({{0, 0, start, 1}}, RUN_BAD_WORK, "a start out of range");
    }
    refused({{0, 0, 33 + ANSWER - 9, 10}}, RUN_BAD_WORK, "an end out of range");
    refused({{0, PIECE_SAMPLE, 33, ANSWER}}, RUN_BAD_WORK, "no room for the sampled token");
    for (const int64_t drafted : {int64_t{10}, int64_t{-1}, HIGHEST, LOWEST}) {
        refused({{0, PIECE_SAMPLE, 20, 10, drafted}}, RUN_BAD_WORK, "a draft out of range");
        refused({{0, PIECE_LOGITS, 20, 10, drafted}}, RUN_BAD_WORK, "a draft out of range");
    }
    constexpr int64_t MANY = Builder::MAX_SAMPLED;
    refused({{0, PIECE_SAMPLE, 0, 30, MANY}}, RUN_TOO_MANY, "too many sampled rows");
    refused({{0, PIECE_LOGITS, 0, 30, MANY}}, RUN_TOO_MANY, "too many rows of logits in a step");
    require_refused(session, {{0, PIECE_LOGITS, 0, 20, 12}, {3, PIECE_SAMPLE, 0, 20, 12}}, RUN_TOO_MANY,
                    "too many rows in all pieces");
    require_refused(session, {{0, 0, 0, 20}, {1, 0, 0, 18}, {4, 0, 12, 1}}, RUN_BAD_WORK, "an invalid last piece");

    int32_t* ids = states[0].ids;
    states[0].ids = nullptr;
    refused({{0, 0, 0, 1}}, RUN_BAD_WORK, "a row without a sequence");
    states[0].ids = ids;
    for (const int64_t adapter : {int64_t{1}, int64_t{-1}, HIGHEST}) {
        states[0].adapters[0].id = adapter;
        states[0].num_adapters = 1;
        refused({{0, 0, 0, 1}}, RUN_BAD_ADAPTER, "an adapter in a program without adapters");
    }
    states[0].num_adapters = 0;
    check_refused_adapters();
    states[0].table_blocks = 2;
    refused({{0, 0, 30, 3}}, RUN_BAD_BLOCK, "a block table that is too short");
    states[0].table_blocks = 3;
    for (int64_t g = 0; g < GROUPS; ++g) {
        int32_t& block = session.sequences[0].tables[g][2];
        const int32_t own = block;
        for (const int32_t id : {0, -1, static_cast<int32_t>(Builder::BLOCKS), std::numeric_limits<int32_t>::max(),
                                 std::numeric_limits<int32_t>::min()}) {
            block = id;
            refused({{0, 0, 20, 13}}, RUN_BAD_BLOCK, "a block out of range");
        }
        block = own;
    }
    int32_t& first = session.sequences[0].tables[1][0];
    first = 0;
    refused({{0, 0, 34, 1}}, RUN_BAD_BLOCK, "an invalid block within the window");
    const Piece past_window = {0, 0, 35, 1};
    require(session.run(&past_window, 1) == RUN_OK, "blocks outside of the window are ignored");

    const int64_t rows[] = {0, 1, 2}, below[] = {0, -1}, above[] = {ROWS, 0};
    require(session.logits(rows, Builder::MAX_CHOSEN + 1) == RUN_TOO_MANY, "too many rows of logits");
    require(session.logits(below, 2) == RUN_BAD_WORK, "logits of a negative row");
    require(session.logits(above, 2) == RUN_BAD_WORK, "logits of a row beyond the buffer");
    require(session.logits(nullptr, 0) == RUN_OK, "logits of no rows");
}

}  // namespace

void test_program() {
    std::mt19937 random(5);
    size_t place = 0;
    for (const Case& c : CASES) check(c, place++, random);
    check_bidirectional(CASES[2]);
    check_calls();
    check_kept_logits();
    check_refusals();
    require(meetings > 0, "Experts::meet was called");
}
