// Threads that wait for work and run it together (team.h says how the work is split).
#pragma once

#include <cstdint>

#include "team.h"

namespace kvasir {

// A pool of 1 to POOL_MAX threads; null where the system gives no more threads. The first is the caller's or, with
// `apart`, a thread of the pool like the others, so that the caller is free while they run. `pin` (Linux only) ties
// each thread of the pool to one processor of those the caller may run on, in turn; the caller itself stays as it is.
// A pool does not survive fork: a child must neither use nor destroy it.
constexpr int32_t POOL_MAX = 1024;
Pool* pool_create(int32_t threads, bool pin, bool apart = false);
// Waits for a run in progress first.
void pool_destroy(Pool* pool);

// Runs `body` on all threads at once. What the caller wrote before is seen by all, and what they wrote by the caller
// once pool_wait has returned. All compute in FloatMode. pool_start returns at once where the caller stays apart, else
// at the end. One run at a time, each awaited before the next is started, and none from inside a body. pool_wait
// returns at once where no run is in progress.
void pool_start(Pool* pool, void (*body)(const Team& team, void* context), void* context);
void pool_wait(Pool* pool);
void pool_run(Pool* pool, void (*body)(const Team& team, void* context), void* context);

}  // namespace kvasir
