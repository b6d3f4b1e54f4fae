// Mixtures of experts: routing, and the experts' MLPs over the rows routed to them.
#pragma once

#include "adapters.h"
#include "kernels.h"
#include "ranks.h"

namespace kvasir {

// The experts of one layer and the buffers to run them. Letters: E experts, k of them for each row.
struct Experts {
    int64_t experts, top_k, width, inner;
    int64_t at_once;      // token rows per pass
    int64_t first, held;  // this rank's experts: `held` of them, from id `first` on
    int32_t function;
    int32_t weigh_inputs;  // whether a row's weight is applied to its expert's input, not to the output
    float limit;  // of the magnitudes of f(gate(x)) and up(x), 0 for none
    const Matrix* gate;  // [held]; of one format, as are up and down
    const Matrix* up;    // null for experts without a gate, whose first matrix is `gate`: down(f(gate(x)))
    const Matrix* down;
    const float* const* gate_bias;  // [held]; null, as up_bias and down_bias, for experts without biases
    const float* const* up_bias;
    const float* const* down_bias;
    int64_t* begins;     // [E + 1]: where each expert's slots begin
    int64_t* slots;      // [max rows * k]: the slot of each choice; slots are sorted by expert, then by row
    int64_t* sources;    // [max rows * k]: the row of each slot
    uint8_t* activated;  // [max rows * k] rows, first for gate and up, then for down
    float* gate_out;     // [max rows * k, inner]
    float* up_out;
    float* down_out;     // [max rows * k, width]
    // Called on thread 0 after the products of a pass and before any row is weighted: the ranks complete the first
    // `slots` rows of down_out, for experts of other ranks and for experts whose sums are split. Null: this rank has
    // everything.
    void (*meet)(void* context, int64_t slots);
    const Meeting* meeting;  // the same where the ranks share memory; null: `meet`
    // Called on thread 0 in each pass, once begins and sources hold the rows of the experts, and gate_out the inputs of
    // their down. first: the token row that sources are relative to. Null: no call.
    void (*inputs)(void* context, int64_t first);
    // Called on thread 0 where the sums of down are split and the ranks do not share memory: adds up the ranks' products
    // with A in Adapters.inner, `slots` rows.
    void (*meet_inner)(void* context, int64_t slots);
};

enum Scores : int32_t { SCORES_SOFTMAX = 0, SCORES_SIGMOID = 1, SCORES_SQRT_SOFTPLUS = 2, SCORES_SPARSEMIXER = 3 };

// How a row chooses its experts: kvasir.ops.moe.routing.
struct Routing {
    int64_t experts, top_k;
    int64_t groups, top_groups;  // equal numbers of adjacent experts, and how many groups may be chosen from
    int64_t best_of_group;       // 1 or 2: the best choices whose sum ranks a group
    int32_t scores, normalise;
    float scale, epsilon;
    const float* bias;    // [experts], added to the scores for the choice only; or null
    const float* scales;  // [experts], of the experts' weights; or null
};

// One row: the ids of its experts, ascending, and their weights. room: route_room(experts) floats.
void route_row(int32_t* ids, float* weights, const float* logits, const Routing& routing, float* room);
constexpr int64_t route_room(int64_t experts) { return 4 * experts + 64; }

// The adapters of a mixture's rows. Null: they change none of its experts.
struct ExpertChanges {
    const Adapters* all;
    const int64_t* slots;  // [3]: of gate, up and down; -1 for none
};

// out[row] = the sum over its experts, ascending, of weight * down(f(gate(x)) * up(x)); all threads of the team call
// it. changes: apply to each product before its bias.
void run_experts(const Experts& e, float* out, const float* x, const int32_t* ids, const float* weights, int64_t rows,
                 const ExpertChanges& changes, const Team& team);

}  // namespace kvasir
