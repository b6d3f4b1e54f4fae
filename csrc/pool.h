// Threads that wait for work and run it together (team.h says how the work is split).
#pragma once

#include <cstdint>

#include "team.h"

namespace kvasir {

// A pool of 1 to POOL_MAX threads; null if the system cannot create them. The first is the caller or, with `apart`, a
// thread of the pool like the others, so that the caller is free while they run. `pin` (Linux only) binds each thread
// of the pool to one of the processors that the caller may run on, in turn; the caller itself is not bound.
// A pool does not survive fork: a child must neither use nor destroy it.
constexpr int32_t POOL_MAX = 1024;
Pool* pool_create(int32_t threads, bool pin, bool apart = false);
// Waits for a run in progress first.
void pool_destroy(Pool* pool);

// Runs `body` on all threads at once. All threads see what the caller wrote before, and the caller sees what they wrote
// once pool_wait has returned. All compute in FloatMode. pool_start returns at once with `apart`, else at the end. Only
// one run at a time: wait for it before starting the next, and start none from inside a body. pool_wait returns at once
// if no run is in progress.
void pool_start(Pool* pool, void (*body)(const Team& team, void* context), void* context);
void pool_wait(Pool* pool);
void pool_run(Pool* pool, void (*body)(const Team& team, void* context), void* context);

}  // namespace kvasir
