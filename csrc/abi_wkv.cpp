// The C ABI of RWKV-7, for tests. A program calls the kernels directly.
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pool.h"
#include "wkv.h"

namespace kvasir {
namespace {

constexpr int64_t LIMIT = 1 << 20;  // of sizes, so that no arithmetic on them overflows

bool is_sound(const InputRows& r) {
    return r.taps == 2 && r.block_size >= 2 && r.block_size <= LIMIT && r.inputs > 0 && r.inputs <= 8 * LIMIT &&
           r.state_size >= 0 && r.group >= 0;
}

bool is_sound(const ShiftArgs& a) {
    return is_sound(a.rows) && a.width > 0 && a.width <= a.rows.inputs && a.count > 0 && a.count <= MAX_MIXES;
}

bool is_sound(const WkvArgs& a) {
    if (!is_sound(a.rows) || a.heads <= 0 || a.heads > LIMIT || a.dim <= 0 || a.dim > MAX_WKV_DIM) return false;
    return a.rows.inputs >= 4 * a.width() && a.rows.state_size == a.heads * a.state_size() &&
           (a.weight == nullptr) == (a.bias == nullptr);
}

template <typename Args>
int32_t run(Args* args, int32_t threads, void (*kernel)(const Team& team, void* context)) {
    if (!is_sound(*args)) return -1;
    Pool* pool = pool_create(threads, false);
    if (pool == nullptr) return -1;
    pool_run(pool, kernel, args);
    pool_destroy(pool);
    return 0;
}

}  // namespace
}  // namespace kvasir

// Runs the token shift on `threads` threads, created for this call; blocks as in wkv.h. Returns 0, or -1 and computes
// nothing if the kernel does not support the sizes, or if the threads cannot be created.
KVASIR_API int32_t kvasir_token_shift(kvasir::ShiftArgs* args, int32_t threads) {
    return kvasir::run(args, threads, [](const kvasir::Team& team, void* context) {
        kvasir::kernels().token_shift(*static_cast<const kvasir::ShiftArgs*>(context), team);
    });
}

// Runs the rule of RWKV-7; as above.
KVASIR_API int32_t kvasir_wkv(kvasir::WkvArgs* args, int32_t threads) {
    return kvasir::run(args, threads, [](const kvasir::Team& team, void* context) {
        kvasir::kernels().wkv(*static_cast<const kvasir::WkvArgs*>(context), team);
    });
}
