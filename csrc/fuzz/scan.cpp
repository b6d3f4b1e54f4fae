// Fuzzes selective state spaces: Mamba and Mamba 2. Sizes that the kernels do not support must be rejected.
#include "recurrent.h"

namespace {

using namespace kvasir_fuzz;
using kvasir_test::ScanLayer;

// Sizes of a layer, some of which are then replaced.
void check_sizes(Input& in) {
    kvasir::ScanArgs args = {};  // without pieces: nothing is computed
    for (int32_t* size : {&args.heads, &args.groups, &args.dim, &args.width, &args.conv.rows.taps, &args.conv.rows.block_size}) {
        *size = in.byte() % 4 ? static_cast<int32_t>(in.between(1, 16)) : hard_size(in);
    }
    args.per_channel = in.flag();
    const __int128 inner = __int128{args.heads} * args.width, shared = __int128{args.groups} * args.dim;
    const __int128 channels = inner + (args.per_channel ? 0 : 2 * shared);
    args.conv.channels = static_cast<int64_t>(channels);
    args.conv.rows.inputs = static_cast<int64_t>(channels + (args.per_channel ? inner + shared : args.heads));
    args.conv.rows.state_size = static_cast<int64_t>(inner) * (in.byte() % 4 ? args.dim % 1024 : 1);
    if (in.byte() % 4 == 0) args.conv.channels = in.any<int64_t>();
    if (in.byte() % 4 == 0) args.conv.rows.inputs = in.any<int64_t>();
    if (in.byte() % 4 == 0) args.conv.rows.state_size = in.any<int64_t>();
    const int32_t found = kvasir_selective_scan(&args, static_cast<int32_t>(in.between(0, 2)));
    const bool fits = args.heads > 0 && args.groups > 0 && args.dim > 0 && args.dim <= kvasir::MAX_SCAN_DIM &&
                      args.width > 0 && args.width <= kvasir::MAX_SCAN_DIM && args.conv.rows.taps > 0 &&
                      args.conv.rows.taps <= kvasir::MAX_SCAN_TAPS && args.conv.rows.block_size >= args.conv.rows.taps &&
                      args.conv.rows.state_size == inner * args.dim && args.conv.channels == channels;
    require(found == -1 || (found == 0 && fits), "unsupported sizes are rejected");
}

}  // namespace

void fuzz_scan(const uint8_t* data, size_t size) {
    Input in(data, size);
    check_sizes(in);
    const Plan plan(in);
    ScanLayer::Sizes s = {};
    s.groups = static_cast<int32_t>(in.between(1, 2));
    s.heads = s.groups * static_cast<int32_t>(in.between(1, 3));
    s.dim = in.one_of({1, 2, 5, 16, 17, 33});
    s.width = in.one_of({1, 7, 16, 23, 33, 64, 70});
    s.taps = static_cast<int32_t>(in.between(1, kvasir::MAX_SCAN_TAPS));
    s.per_channel = in.flag();
    s.low = in.one_of({0.0f, 0.1f, -INFINITY});
    s.high = in.one_of({1e9f, 1.5f, INFINITY});
    fuzz_layer(plan, ScanLayer(s, plan.rows * plan.length, filled_by(in)));
}
