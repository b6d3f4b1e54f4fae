// Fuzzes the gated short convolution. Sizes that the kernel does not support must be rejected.
#include "recurrent.h"

namespace {

using namespace kvasir_fuzz;
using kvasir_test::ShortConvLayer;

void check_sizes(Input& in) {
    kvasir::ShortConvArgs args = {};  // without pieces: nothing is computed
    for (int32_t* size : {&args.width, &args.taps, &args.block_size}) {
        *size = in.flag() ? static_cast<int32_t>(in.between(1, 8)) : hard_size(in);
    }
    const int32_t found = kvasir_short_conv(&args, static_cast<int32_t>(in.between(0, 2)));
    const bool fits = args.width > 0 && args.taps > 0 && args.taps <= kvasir::MAX_TAPS && args.block_size >= args.taps;
    require(found == -1 || (found == 0 && fits), "unsupported sizes are rejected");
}

}  // namespace

void fuzz_short_conv(const uint8_t* data, size_t size) {
    Input in(data, size);
    check_sizes(in);
    const Plan plan(in);
    const ShortConvLayer::Sizes s = {static_cast<int32_t>(in.between(1, 150)),
                                     static_cast<int32_t>(in.between(1, kvasir::MAX_TAPS)), in.flag()};
    fuzz_layer(plan, ShortConvLayer(s, plan.rows * plan.length, filled_by(in)));
}
