// Fuzzes the gated delta rule, with one decay for a head or one for each row of its state. Sizes that the kernel does
// not support must be rejected.
#include "recurrent.h"

namespace {

using namespace kvasir_fuzz;
using kvasir_test::DeltaLayer;

void check_sizes(Input& in) {
    kvasir::DeltaArgs args = {};  // without pieces: nothing is computed
    for (int32_t* size : {&args.qk_heads, &args.v_heads, &args.dim, &args.v_dim, &args.taps, &args.block_size, &args.decays}) {
        *size = in.flag() ? static_cast<int32_t>(in.between(1, 8)) : hard_size(in);
    }
    const int32_t found = kvasir_gated_delta(&args, static_cast<int32_t>(in.between(0, 2)));
    const bool fits = args.dim > 0 && args.dim <= kvasir::MAX_DELTA_DIM && args.v_dim > 0 &&
                      args.v_dim <= kvasir::MAX_DELTA_DIM && args.taps <= kvasir::MAX_TAPS && args.taps > 0 &&
                      args.block_size >= args.taps && args.qk_heads > 0 && args.v_heads >= args.qk_heads;
    require(found == -1 || (found == 0 && fits), "unsupported sizes are rejected");
}

}  // namespace

void fuzz_delta(const uint8_t* data, size_t size) {
    Input in(data, size);
    check_sizes(in);
    const Plan plan(in);
    DeltaLayer::Sizes s = {};
    s.qk_heads = static_cast<int32_t>(in.between(1, 3));
    s.v_heads = s.qk_heads * static_cast<int32_t>(in.between(1, 3));
    s.dim = in.one_of({1, 2, 5, 15, 16, 17, 32, 40});
    s.v_dim = in.one_of({1, 7, 16, 31, 33, 64, 80});
    s.taps = static_cast<int32_t>(in.between(1, kvasir::MAX_TAPS));
    s.tiled = in.flag();
    s.decays = in.flag() ? s.dim : 1;
    s.strength = in.one_of({1.0f, 2.0f});
    fuzz_layer(plan, DeltaLayer(s, plan.rows * plan.length, filled_by(in)));
}
