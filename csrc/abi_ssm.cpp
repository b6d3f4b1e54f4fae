// The C ABI of selective state spaces, for tests. A program calls the kernels directly.
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pool.h"
#include "ssm.h"

namespace kvasir {
namespace {

// Whether the sizes are valid. They are bounded so that no arithmetic on them overflows.
bool is_sound(const ScanArgs& a) {
    constexpr int64_t limit = 1 << 20;
    const InputRows& r = a.conv.rows;
    if (a.heads <= 0 || a.heads > limit || a.groups <= 0 || a.heads % a.groups != 0) return false;
    if (a.dim <= 0 || a.dim > MAX_SCAN_DIM || a.width <= 0 || a.width > MAX_SCAN_DIM) return false;
    if (r.taps <= 0 || r.taps > MAX_SCAN_TAPS || r.block_size < r.taps || r.block_size > limit) return false;
    const int64_t shared = int64_t{a.groups} * a.dim;
    const bool is_whole = a.conv.channels == a.inner() + (a.per_channel ? 0 : 2 * shared);
    const int64_t inputs = a.conv.channels + a.steps() + (a.per_channel ? shared : 0);
    return is_whole && r.inputs == inputs && r.state_size == a.heads * a.state_size();
}

void run(const Team& team, void* context) {
    const ScanArgs& args = *static_cast<const ScanArgs*>(context);
    kernels().causal_convolution(args.conv, team);
    team.barrier();
    kernels().selective_scan(args, team);
}

}  // namespace
}  // namespace kvasir

// Runs the convolution and the scan on `threads` threads, created for this call; states and blocks as in ssm.h. Returns
// 0, or -1 and computes nothing if the kernels do not support the sizes, or if the threads cannot be created.
KVASIR_API int32_t kvasir_selective_scan(kvasir::ScanArgs* args, int32_t threads) {
    if (!kvasir::is_sound(*args)) return -1;
    kvasir::Pool* pool = kvasir::pool_create(threads, false);
    if (pool == nullptr) return -1;
    kvasir::pool_run(pool, kvasir::run, args);
    kvasir::pool_destroy(pool);
    return 0;
}
