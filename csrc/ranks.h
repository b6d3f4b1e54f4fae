// Processes that share a model, its ranks: each has a part of every matrix, and all meet in one segment of shared memory
// to complete each other's results (kvasir.parallel has the same operations on arrays).
//
// In a meeting every rank writes its array into its slot, says that it has come, waits for the others, and reads their
// slots. Slots alternate between two places: a rank that comes to a meeting has read everything of the last but one, so
// one wait per meeting is enough. Arrays beyond a slot are exchanged piece by piece.
//
// A model may also be divided by its layers, into stages of as many ranks each, with slots of their own. What a stage
// leaves for the next lies in memory that Python maps; the segment has only the counts of what was left.
//
// A rank waits by spinning, then by yielding, then it sleeps on a futex. Once the ranks are aborted, because one has died
// or does not come, all waits end: the results of meetings are then wrong and must not be used.
#pragma once

#include "team.h"

namespace kvasir {

constexpr int32_t MAX_RANKS = 8;
constexpr int32_t MAX_STAGES = 16;
constexpr int32_t MAX_PROCESSES = MAX_RANKS * MAX_STAGES;
constexpr int64_t SLOT_FLOATS = 1 << 17;

struct Ranks;  // a process's view of the segment

// The operands of a meeting. A sum or a table is cut into `parts`, a power of two: rank r has part r * parts / size.
struct Meeting {
    Ranks* ranks;
    int32_t kind;   // a MeetingKind
    int32_t parts;  // of the sum, 1 if it is not cut; of the columns; of the rows
    int32_t shares;  // of experts: the parts that their ids are cut into, 1 if they are not
    int32_t lead_only;  // whether only rank 0 needs the columns; the others get none
    int64_t width;  // of a row of the result
    int64_t borders[MAX_RANKS + 1];  // of the parts of columns, rows or experts
};

enum MeetingKind : int32_t {
    MEET_SUM = 0,      // the parts' sums, added in a balanced tree: neighbors first
    MEET_COLUMNS = 1,  // the columns of all parts
    MEET_PICK = 2,     // each row from the part that has its id
    MEET_EXPERTS = 3,  // rows of experts: sums, or each from the part that has the expert
};

// All threads of the team call these; a barrier must follow before a thread reads what another got.
// x, out: [rows, width]; out may be x. scales: null, or of each row, by which its sum is multiplied.
void meet_sum(const Meeting& m, float* out, const float* x, int64_t rows, int64_t width, const float* scales,
              const Team& team);
// x: [rows, this rank's columns].
void meet_columns(const Meeting& m, float* out, const float* x, int64_t rows, const Team& team);
void meet_pick(const Meeting& m, float* out, const float* x, const int64_t* ids, int64_t rows, const Team& team);
// Completes rows that are sorted by expert; those of expert e begin at begins[e].
void meet_experts(const Meeting& m, float* rows_inout, const int64_t* begins, int64_t rows, const Team& team);

}  // namespace kvasir
