// Fuzzes RWKV-7: its token shift and its rule. Sizes that the kernels do not support must be rejected.
#include "recurrent.h"

namespace {

using namespace kvasir_fuzz;
using kvasir_test::ShiftLayer;
using kvasir_test::WkvLayer;

// Sizes of the rule, some of which are then replaced.
void check_sizes(Input& in) {
    kvasir::WkvArgs args = {};  // without pieces: nothing is computed
    args.rows.taps = 2;
    for (int32_t* size : {&args.heads, &args.dim, &args.rows.block_size}) {
        *size = in.byte() % 4 ? static_cast<int32_t>(in.between(2, 16)) : hard_size(in);
    }
    const __int128 width = __int128{args.heads} * args.dim;
    args.rows.inputs = in.byte() % 4 ? static_cast<int64_t>(5 * width) : in.any<int64_t>();
    args.rows.state_size = in.byte() % 4 ? static_cast<int64_t>(width) * (args.dim % 1024) : in.any<int64_t>();
    if (in.byte() % 4 == 0) args.rows.taps = hard_size(in);
    const int32_t found = kvasir_wkv(&args, static_cast<int32_t>(in.between(0, 2)));
    const bool fits = args.heads > 0 && args.dim > 0 && args.dim <= kvasir::MAX_WKV_DIM && args.rows.taps == 2 &&
                      args.rows.block_size >= 2 && args.rows.inputs >= 4 * width &&
                      args.rows.state_size == width * args.dim;
    require(found == -1 || (found == 0 && fits), "unsupported sizes are rejected");
}

}  // namespace

void fuzz_wkv(const uint8_t* data, size_t size) {
    Input in(data, size);
    check_sizes(in);
    const Plan plan(in);
    if (in.flag()) {
        const ShiftLayer::Sizes s = {in.one_of({1, 7, 16, 23, 33, 70}), static_cast<int32_t>(in.between(1, kvasir::MAX_MIXES)),
                                     in.one_of({0, 5, 64})};
        fuzz_layer(plan, ShiftLayer(s, plan.rows * plan.length, filled_by(in)));
    } else {
        const WkvLayer::Sizes s = {static_cast<int32_t>(in.between(1, 3)), in.one_of({1, 2, 5, 16, 17, 33, 64}), in.flag(),
                                   in.one_of({0, 5, 64})};
        fuzz_layer(plan, WkvLayer(s, plan.rows * plan.length, filled_by(in)));
    }
}
