// Executes a program: the gather, and the loop over the instructions.
#include "program.h"

#include <time.h>

#include "instructions.h"
#include "kvasir_cpu.h"

namespace kvasir {
namespace {

uint64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// ---- gather ----------------------------------------------------------------------------------------------------

// The adapters in effect for the token rows of a piece.
int32_t gather_adapters(Program& p, const RowState& state, const Piece& piece) {
    const Adapters* all = p.adapters;
    if (state.num_adapters < 0 || state.num_adapters > MAX_APPLIED) return RUN_BAD_ADAPTER;
    for (int64_t i = 0; i < state.num_adapters; ++i) {
        const int64_t id = state.adapters[i].id;
        if (!all || id < 1 || id >= all->count || !all->tables[id]) return RUN_BAD_ADAPTER;
    }
    for (int64_t i = 0; all && i < piece.count; ++i) {
        InEffect* to = all->in_effect + (piece.first + i) * MAX_APPLIED;
        int64_t found = 0;
        for (int64_t j = 0; j < state.num_adapters; ++j) {
            const Applied& adapter = state.adapters[j];
            if (adapter.start <= piece.start + i) to[found++] = {static_cast<int32_t>(adapter.id), adapter.scale};
        }
        if (found) ++p.adapted;
        for (; found < MAX_APPLIED; ++found) to[found] = {0, 0.0f};
    }
    return RUN_OK;
}

int32_t gather_piece(Program& p, Piece& piece, int64_t row) {
    if (piece.row < 0 || piece.row >= p.max_rows) return RUN_BAD_WORK;
    const RowState& state = p.states[piece.row];
    if (!state.ids || piece.start < 0 || piece.count < 1) return RUN_BAD_WORK;
    if (piece.count > state.max_ids - piece.start) return RUN_BAD_WORK;
    if (piece.drafted < 0 || piece.drafted >= piece.count) return RUN_BAD_WORK;
    const int64_t end = piece.start + piece.count;
    if (end > state.table_blocks * p.block_size) return RUN_BAD_BLOCK;
    for (int64_t i = 0; i < piece.count; ++i) {
        p.tokens[row + i] = state.ids[piece.start + i];
        p.positions[row + i] = piece.start + i;
    }
    for (int64_t g = 0; g < p.groups; ++g) {
        const int32_t* table = state.tables[g];
        const int64_t low = first_in_window(piece.start, p.windows[g]);
        for (int64_t b = low / p.block_size; b * p.block_size < end; ++b) {
            if (table[b] <= 0 || table[b] >= p.num_blocks[g]) return RUN_BAD_BLOCK;
        }
        for (int64_t i = 0; i < piece.count; ++i) {
            const int64_t position = piece.start + i;
            p.slots[g][row + i] = table[position / p.block_size] * p.block_size + position % p.block_size;
        }
    }
    piece.first = row;
    piece.tables = state.tables;
    piece.reached = state.reached;
    return gather_adapters(p, state, piece);
}

// Chooses the last 1 + drafted token rows of a gathered piece.
int32_t choose_rows(Run& run, const Piece& piece) {
    Program& p = *run.program;
    const int64_t count = 1 + piece.drafted, first = piece.first + piece.count - count;
    if (count > p.max_sampled - run.chosen) return RUN_TOO_MANY;
    for (int64_t i = 0; i < count; ++i) p.chosen[run.chosen + i] = first + i;
    run.chosen += count;
    return RUN_OK;
}

// Chooses these rows to sample the id after each. A drafted id lies where the positions after it look for ids, so all
// positions can be sampled at once; results after the first that differs from the draft are meaningless.
int32_t gather_sampled(Run& run, const Piece& piece) {
    Program& p = *run.program;
    const RowState& state = p.states[piece.row];
    const int64_t first = run.chosen, known = piece.start + piece.count - piece.drafted;
    if (piece.start + piece.count >= state.max_ids) return RUN_BAD_WORK;
    if (const int32_t error = choose_rows(run, piece)) return error;
    for (int64_t i = 0; i <= piece.drafted; ++i) {
        SampleRow& spec = p.specs[first + i];
        spec = state.spec;
        spec.position = spec.num_ids = known + i;
        spec.ids = state.ids;
        p.sampler_rows[first + i] = piece.drafted ? -1 : piece.row;
    }
    run.sampling = run.chosen;
    return RUN_OK;
}

int32_t gather(Run& run, const Piece* pieces, int64_t num_pieces) {
    Program& p = *run.program;
    p.adapted = 0;
    if (num_pieces > p.max_rows) return RUN_TOO_MANY;
    for (int64_t i = 0; i < num_pieces; ++i) {
        Piece& piece = p.pieces[i] = pieces[i];
        if (piece.count > p.max_tokens - run.rows) return RUN_TOO_MANY;
        if (const int32_t error = gather_piece(p, piece, run.rows)) return error;
        run.rows += piece.count;
        if (!(piece.flags & PIECE_SAMPLE)) continue;
        if (const int32_t error = gather_sampled(run, piece)) return error;
    }
    for (int64_t i = 0; i < num_pieces; ++i) {
        if ((p.pieces[i].flags & (PIECE_SAMPLE | PIECE_LOGITS)) != PIECE_LOGITS) continue;
        if (const int32_t error = choose_rows(run, p.pieces[i])) return error;
    }
    run.num_pieces = num_pieces;
    if (p.adapters) list_adapted(*p.adapters, p.adapters->tokens, nullptr, run.rows);
    return RUN_OK;
}

// ---- the loop --------------------------------------------------------------------------------------------------

// Tells other threads that all instructions before the i-th are complete: called by a thread that has passed a barrier
// after them.
void publish(const Run& run, int64_t i) { __atomic_store_n(&run.program->progress, i, __ATOMIC_RELEASE); }

void walk(const Run& run, int64_t first, int64_t last, int64_t rows, const Team& team) {
    const Program& p = *run.program;
    uint64_t* times = team.thread == 0 ? p.nanoseconds : nullptr;
    uint64_t begun = times ? now() : 0;
    for (int64_t i = first; i < last; ++i) {
        const Instr& in = p.instrs[i];
        if (in.flags & BARRIER) {
            team.barrier();
            if (team.thread == 0) publish(run, i);
        }
        run_instr(in, run, rows, team);
        if (times) {
            const uint64_t ended = now();
            times[i] += ended - begun;
            begun = ended;
        }
    }
    team.barrier();
    if (team.thread == 0) publish(run, last);
}

void run_sections(Run& run, const Team& team) {
    const Program& p = *run.program;
    const int64_t all = run.chosen;
    if (run.rows) walk(run, 0, p.chosen_from, run.rows, team);
    for (run.chosen_first = 0; run.chosen_first < all; run.chosen_first += p.max_chosen) {
        const int64_t left = all - run.chosen_first;
        run.chosen = left < p.max_chosen ? left : p.max_chosen;
        // All threads are past the last section, and read the list after the barrier before the first product.
        if (p.adapted && team.thread == 0) {
            list_adapted(*p.adapters, p.adapters->chosen, p.chosen + run.chosen_first, run.chosen);
        }
        walk(run, p.chosen_from, p.count, run.chosen, team);
    }
}

// Executes the program on one thread. Arguments come from `started`, since the call that started the run may have
// returned.
void run_body(const Team& team, void* context) {
    Program& p = *static_cast<Program*>(context);
    Run run = {&p, p.started.rows, p.started.chosen, 0, p.started.pieces, p.started.sampling};
    const uint64_t begun = team.thread == 0 ? now() : 0;
    run_sections(run, team);
    if (team.thread != 0) return;
    for (int64_t i = 0; i < run.num_pieces; ++i) p.states[p.pieces[i].row].reached = p.pieces[i].start + p.pieces[i].count;
    p.kernel_nanoseconds = now() - begun;
    if (p.nanoseconds) p.nanoseconds[p.count] += p.kernel_nanoseconds;
}

void start(const Run& run, Pool* pool) {
    run.program->started = {run.rows, run.chosen, run.num_pieces, run.sampling};
    pool_start(pool, run_body, run.program);
}

}  // namespace
}  // namespace kvasir

using namespace kvasir;

// Starts one step: computes all pieces and samples those with PIECE_SAMPLE. At the end of the step, program->results
// holds the results in the order of the sampled pieces, 1 + drafted for each. Tokens sampled for pieces without a draft
// are appended to the rows' ids; the others change no ids, so that ranks may sample over the same rows. If the caller is
// not a thread of the pool (`apart`), this returns immediately and kvasir_program_wait waits for the end; rows and
// results must not be accessed before. Returns a RunError; on an error no step is started.
KVASIR_API int32_t kvasir_program_start(Program* program, void* pool, const Piece* pieces, int64_t num_pieces) {
    Run run = {program, 0, 0, 0, 0, 0};
    if (const int32_t error = gather(run, pieces, num_pieces)) return error;
    __atomic_store_n(&program->progress, 0, __ATOMIC_RELAXED);
    start(run, static_cast<Pool*>(pool));
    return RUN_OK;
}

// How many of the first instructions are complete in the run in progress, or were in the last one: what they have
// written may be read. For any thread. Counts up to chosen_from; the last instructions may run several times.
KVASIR_API int64_t kvasir_program_progress(const Program* program) {
    const int64_t done = __atomic_load_n(&program->progress, __ATOMIC_ACQUIRE);
    return done < program->chosen_from ? done : program->chosen_from;
}

KVASIR_API void kvasir_program_wait(void* pool) { pool_wait(static_cast<Pool*>(pool)); }

// Starts a step and waits for its end.
KVASIR_API int32_t kvasir_program_run(Program* program, void* pool, const Piece* pieces, int64_t num_pieces) {
    if (const int32_t error = kvasir_program_start(program, pool, pieces, num_pieces)) return error;
    kvasir_program_wait(pool);
    return RUN_OK;
}

// Executes only the chosen section, without sampling, over `rows` of the last run. Their logits stay in the program's
// buffer. count must not exceed max_chosen.
KVASIR_API int32_t kvasir_program_logits(Program* program, void* pool, const int64_t* rows, int64_t count) {
    if (count > program->max_chosen) return RUN_TOO_MANY;
    for (int64_t i = 0; i < count; ++i) {
        if (rows[i] < 0 || rows[i] >= program->max_tokens) return RUN_BAD_WORK;
        program->chosen[i] = rows[i];
    }
    start({program, 0, count, 0, 0, 0}, static_cast<Pool*>(pool));
    pool_wait(static_cast<Pool*>(pool));
    return RUN_OK;
}

KVASIR_API int64_t kvasir_attention_scratch(const CacheLayout* layout, int32_t heads) {
    return attention_scratch(*layout, heads);
}
