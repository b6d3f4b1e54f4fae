// The threads that run a step together. Each calls the same kernels with its own `thread`, and takes its share of the
// work by a static split; if one kernel reads what another wrote, `barrier` separates them.
#pragma once

#include <cstdint>

namespace kvasir {

struct Pool;

struct Team {
    int32_t thread;   // 0 to threads - 1
    int32_t threads;
    Pool* pool;       // null for a team of one

    void barrier() const;  // waits for all threads of the team (pool.cpp)
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
