// A program: the forward of a model as a flat list of kernel calls over buffers that were laid out once. Sizes come
// from the step, so one program serves every batch, chunk and length. One call of `kvasir_program_run` is one step.
//
//     gather    pieces -> tokens, positions, slots       (thread 0)
//     rows      the instructions up to `chosen_from`, over all token rows of the step
//     chosen    the rest, over the rows whose logits are wanted, at most `max_chosen` at a time
//
// All threads execute the list together. An instruction that reads what other threads wrote has BARRIER set;
// instructions that go row by row split the rows in the same way, so there is none between them.
#pragma once

#include "adapters.h"
#include "experts.h"
#include "kernels.h"
#include "pool.h"

namespace kvasir {

constexpr int64_t MAX_GROUPS = 8;

// Where an op has "1 + slot", 0 stands for no slot. Sections: 0 token rows, 1 chosen rows.
enum Op : int32_t {
    OP_EMBED = 0,       // p: matrix, out                    n: width, source (0 tokens, 1 positions), first, part,
                        // 1 + slot
                        // part: 0 the whole table; or the rows from id `first` on, 1 other ids give zeros, 2 its first row
    OP_RMS_NORM = 1,    // p: out, x, weight                 n: heads, width of one, x stride, out stride, weight stride,
                        // 1 + slot, section                 f: eps
    OP_LAYER_NORM = 2,  // p: out, x, weight, bias           n: heads, width of one, weight stride, 1 + slot, section
                        // f: eps
    OP_PREPARE = 3,     // p: matrix, out, x                 n: x stride
    OP_LINEAR = 4,      // p: LinearPart[], x, slots[]       n: count, section (0 token rows, 1 chosen rows), replaces
                        // replaces: adapters only replace matrices; their A x and B follow, once the ranks have summed
                        // slots: each part's index in the adapters' tables, -1 for none; null if no part has one
    OP_ROPE = 5,        // p: out, x, RopeTable              n: heads, head_dim, half, x stride, out stride
    OP_STORE = 6,       // p: StoreArgs                      n: group
    OP_ATTENTION = 7,   // p: AttentionArgs                  n: group
    OP_ACTIVATE = 8,    // p: out, x                         n: width, function
    OP_GATED = 9,       // p: out, gate, up                  n: width, function
    OP_ADD = 10,        // p: out, a, b                      n: width
    OP_MULTIPLY = 11,   // p: out, a, b                      n: width
    OP_ADD_VECTOR = 12, // p: out, x, vector                 n: width
    OP_SCALE = 13,      // p: out, x                         n: width                          f: factor
    OP_SOFTCAP = 14,    // p: out, x                         n: width                          f: cap
    OP_CHOOSE = 15,     // p: out, x                         n: width          rows of x by the step's choice
    OP_SAMPLE = 16,     // p: logits                         n: vocabulary
    OP_ROUTE = 17,      // p: ids, weights, logits, room, Routing
    OP_EXPERTS = 18,    // p: Experts, out, x, ids, weights  n: 1 + slot of gate, of up and of down
    OP_CALL = 19,       // p: function(context, rows), context: a call out, on thread 0 only
    OP_ADAPT_INNER = 20,  // p: x                            n: slot, scaled   ranks add up A x before B is applied
    OP_ADAPT_ADD = 21,    // p: out                          n: slot, width
    OP_GATED_DELTA = 22,  // p: DeltaArgs
    OP_SCALE_ROWS = 23,   // p: out, x, factors [rows, parts]  n: width, parts of a row with a factor each, 0 for one
    OP_SHORT_CONV = 24,   // p: ShortConvArgs
    OP_CONVOLUTION = 25,  // p: ConvolutionArgs
    OP_SCAN = 26,         // p: ScanArgs
    OP_PREPARE_HEADS = 27,  // p: matrix, out, x             n: heads, bytes from one head's rows in out to the next's
                            // of each row, heads of matrix->cols: LinearParts multiply each by a matrix of its own
    OP_JOIN = 28,         // p: out, a, b                    n: heads, width of one in a, in b: a's heads before b's
    OP_TAKE_COLUMNS = 29,  // p: out, x                      n: width, x stride, first column
    OP_CLAMP = 30,        // p: out, x                       n: width                          f: lowest, highest
    OP_XIELU = 31,        // p: out, x, settings             n: width
    OP_SCALE_COLUMNS = 32,  // p: out, x, vector             n: width
    OP_GAUSSIAN_CUT = 33,  // p: out, x                      n: width                          f: deviations
    OP_MATCH = 34,         // p: out, x, like                n: width                          f: least
    OP_PREDICT = 35,       // p: out, x, coefs               n: width, streams
    OP_CORRECT = 36,       // p: out, x, computed, coefs     n: width, streams, active stream
    OP_ADD_TO_STREAMS = 37,  // p: out, x, added             n: width, streams; the first stays
    OP_SELECT = 38,        // p: IndexArgs
    OP_SELECTED_ATTENTION = 39,  // p: SelectedArgs          n: group
    OP_TOKEN_SHIFT = 40,   // p: ShiftArgs
    OP_WKV = 41,           // p: WkvArgs
    OP_MEET = 42,          // p: out, x, Meeting             n: whether the adapters' A x is summed and scaled, too
};

enum Flag : int32_t { BARRIER = 1 };

struct Instr {
    int32_t op, flags;
    int64_t n[8];
    float f[2];
    const void* p[6];
};

struct RopeTable {
    const float* cos;  // [positions, half]
    const float* sin;
};

// The runner's state of a sequence: its ids and block tables stay in place from joining to leaving.
struct RowState {
    int32_t* ids;
    const int32_t* tables[MAX_GROUPS];
    int64_t max_ids;
    int64_t table_blocks;
    SampleRow spec;  // position and ids are filled in by the step
    Applied adapters[MAX_APPLIED];  // in the order in which they apply
    int64_t num_adapters;
    int64_t reached;  // the tokens after which its recurrent states are, 0 for none
};

// The arguments of a run.
struct Started {
    int64_t rows, chosen, pieces;
    int64_t sampling;  // how many of the chosen rows, from the first on, are sampled
};

struct Program {
    const Instr* instrs;
    int64_t count, chosen_from;
    int64_t max_tokens, max_chosen, max_rows;  // token rows of a step, rows of logits at a time, rows of the runner
    int64_t max_sampled;  // rows of logits of a step that are sampled or kept
    int64_t groups, block_size;
    int64_t num_blocks[MAX_GROUPS], windows[MAX_GROUPS];
    // Buffers of the gather, [max_tokens] each, except pieces, which are [max_rows], and the sampler's, [max_sampled].
    int64_t* tokens;
    int64_t* positions;
    int64_t* slots[MAX_GROUPS];
    Piece* pieces;
    int64_t* chosen;  // [max_sampled] or [max_chosen], whichever is more
    int32_t* sampler_rows;  // the rows of the runner whose next ids are sampled; -1 for those with a draft
    SampleRow* specs;
    RowState* states;  // [max_rows]
    Sampled* results;  // [max_sampled], in the order of the pieces that sample and of their rows
    uint8_t* scratch;  // scratch_bytes for each thread
    int64_t scratch_bytes;
    int32_t* dry_room;  // as in SampleArgs
    int64_t dry_ids;
    uint64_t* nanoseconds;  // [count + 1] summed per instruction and in total, or null
    uint64_t kernel_nanoseconds;  // of the last run
    Started started;
    Adapters* adapters;  // null: there are none
    int64_t adapted;     // token rows of the last run for which one is in effect
    int64_t progress;    // instructions of this run that are complete on all threads; accessed atomically
};

enum RunError : int32_t {
    RUN_OK = 0,
    RUN_TOO_MANY = 1,   // more token rows or pieces than the buffers hold
    RUN_BAD_WORK = 2,   // tokens that the row does not have
    RUN_BAD_BLOCK = 3,  // a block id out of range
    RUN_BAD_ADAPTER = 4,  // an adapter that does not exist
};

}  // namespace kvasir
