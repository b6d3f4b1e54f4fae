// The C ABI of the gated short convolution, for tests. A program calls the kernel directly.
#include "delta.h"
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pool.h"

// Runs the convolution on `threads` threads, created for this call; blocks as in short_conv.h. Returns 0, or -1 and
// computes nothing if the kernel does not support the sizes, or if the threads cannot be created.
KVASIR_API int32_t kvasir_short_conv(kvasir::ShortConvArgs* args, int32_t threads) {
    const kvasir::ShortConvArgs& a = *args;
    const bool is_sound = a.width > 0 && a.taps > 0 && a.taps <= kvasir::MAX_TAPS && a.block_size >= a.taps;
    if (!is_sound) return -1;
    kvasir::Pool* pool = kvasir::pool_create(threads, false);
    if (pool == nullptr) return -1;
    kvasir::pool_run(pool, [](const kvasir::Team& team, void* context) {
        kvasir::kernels().short_conv(*static_cast<const kvasir::ShortConvArgs*>(context), team);
    }, args);
    kvasir::pool_destroy(pool);
    return 0;
}
