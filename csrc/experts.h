// Mixtures of experts: routing, and the experts' MLPs over the rows routed to them.
#pragma once

#include "kernels.h"

namespace kvasir {

// The experts of one layer and the buffers to run them. Letters: E experts, k of them for each row.
struct Experts {
    int64_t experts, top_k, width, inner;
    int64_t at_once;      // token rows per pass
    int64_t first, held;  // this rank's experts: `held` of them, from id `first` on
    int32_t function, reserved;
    const Matrix* gate;  // [held]; of one format, as are up and down
    const Matrix* up;
    const Matrix* down;
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
    // Called on thread 0 in each pass, once begins and sources hold the rows of the experts, and gate_out the inputs of
    // their down. first: the token row that sources are relative to. Null: no call.
    void (*inputs)(void* context, int64_t first);
};

// One row: the top_k ids of `logits` [experts], ascending, and their weights; equal logits go to the lower id. A weight
// is the expert's probability in the softmax over all experts or, with normalise, over the chosen ones. Both sums use
// the halving tree in ascending id. room: [2 * experts + 32].
void route_row(int32_t* ids, float* weights, const float* logits, int64_t experts, int64_t top_k, bool normalise,
               float* room);

// out[row] = the sum over its experts, ascending, of weight * down(f(gate(x)) * up(x)); all threads of the team call
// it.
void run_experts(const Experts& e, float* out, const float* x, const int32_t* ids, const float* weights, int64_t rows,
                 const Team& team);

}  // namespace kvasir
