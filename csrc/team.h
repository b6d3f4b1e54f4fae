// The threads that run a step together. Each calls the same kernels with its own `thread`. Most take their share of the
// work by a static split; products of many rows are drawn piece by piece, so that a slow or disturbed processor delays
// the others by one piece at most. If one kernel reads what another wrote, `barrier` separates them.
#pragma once

#include <cstdint>

namespace kvasir {

struct Pool;

struct Team {
    int32_t thread;   // 0 to threads - 1
    int32_t threads;
    Pool* pool;       // null for a team of one

    void barrier() const;  // waits for all threads of the team (pool.cpp)

    // The number of this thread's next draw: all threads make the same draws in the same order.
    uint64_t next_draw() const;
    // A piece of the draw that no other thread has, from 0 on, or -1 if all `count` (below 2^16) are taken. A team of
    // more than one thread. Writes become visible at the next barrier.
    int64_t draw(uint64_t number, int64_t count) const;
};

struct Range {
    int64_t begin, end;
};

// This thread's share of `count` pieces of equal cost, in runs of `unit`.
static inline Range share(const Team& team, int64_t count, int64_t unit = 1) {
    const int64_t units = (count + unit - 1) / unit;
    const int64_t begin = units * team.thread / team.threads * unit;
    const int64_t end = units * (team.thread + 1) / team.threads * unit;
    return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace kvasir
