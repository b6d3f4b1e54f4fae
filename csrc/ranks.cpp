#include "ranks.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif
#include <time.h>
#include <unistd.h>

#include "dispatch.h"
#include "kvasir_cpu.h"

namespace kvasir {
namespace {

constexpr int32_t YIELDS = 1000;
constexpr int64_t PERIOD = 100'000'000, LONG_PERIOD = 1'000'000'000;  // nanoseconds of a sleep, and of a patient one

// A counter that ranks wait for. It lies in memory that all of them map at different addresses.
struct alignas(64) Event {
    std::atomic<uint32_t> count;
    std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

struct Segment {
    Event aborted;
    Event given;                    // the commands of process 0
    Event planned;                  // the parts of steps among them
    Event done[MAX_PROCESSES];      // how many commands each other process has carried out
    Event arrived[MAX_PROCESSES];   // how many meetings each process has come to
    Event sent[MAX_STAGES];         // how many parts of steps each stage has computed, and left for the next
};
constexpr int64_t HEADER = 1 << 15;
static_assert(sizeof(Segment) <= HEADER);

void relax() {
#if defined(KVASIR_X86)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

#if defined(__linux__)

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t nanoseconds) {
    const timespec period = {nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &period, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, MAX_PROCESSES, nullptr, nullptr, 0);
}

#else

void futex_wait(std::atomic<uint32_t>&, uint32_t, int64_t) {
    const timespec moment = {0, 50'000};
    nanosleep(&moment, nullptr);
}

void futex_wake(std::atomic<uint32_t>&) {}

#endif

// The sequentially consistent accesses here and in Ranks::sleep: either the sleeper sees the new count, or this sees the
// sleeper.
void raise(Event& event, uint32_t count) {
    event.count.store(count, std::memory_order_seq_cst);
    if (event.sleepers.load(std::memory_order_seq_cst)) futex_wake(event.count);
}

}  // namespace

struct Ranks {
    Segment* segment;
    float* slots;  // of this stage, [2][size][SLOT_FLOATS]
    int32_t rank, size;
    int32_t stage, stages;
    int32_t first;      // the number of the process that is rank 0 of this stage
    int32_t pauses;   // spins before a rank yields; below 0 it sleeps at once
    int32_t periods;  // sleeps of PERIOD after which a wait for another rank aborts all; 0 for none
    uint32_t met = 0, given = 0, received = 0;

    int32_t number() const { return first + rank; }
    int32_t processes() const { return size * stages; }
    bool aborted() const { return segment->aborted.count.load(std::memory_order_acquire); }
    void abort();
    bool await(Event& event, uint32_t count, bool patient);
    bool sleep(Event& event, uint32_t count, bool patient);
    bool meet();

    float* slot(uint32_t number, int64_t of_rank) const {
        return slots + (static_cast<int64_t>(number % 2) * size + of_rank) * SLOT_FLOATS;
    }
    // The slot of a part of `parts`: that of the first rank that has the part.
    const float* part_slot(uint32_t number, int32_t part, int32_t parts) const {
        return slot(number, part * (size / parts));
    }
    int32_t part(int32_t parts) const { return static_cast<int32_t>(static_cast<int64_t>(rank) * parts / size); }
    // Whether the others read this rank's slot for its part, and not that of a neighbor with the same part.
    bool speaks(int32_t parts) const { return rank % (size / parts) == 0; }
};

void Ranks::abort() {
    raise(segment->aborted, 1);
    for (int32_t i = 0; i < processes(); ++i) {
        futex_wake(segment->arrived[i].count);
        futex_wake(segment->done[i].count);
    }
    for (int32_t i = 0; i < stages; ++i) futex_wake(segment->sent[i].count);
    futex_wake(segment->given.count);
}

// Waits until an event has happened `count` times. False once the ranks are aborted.
bool Ranks::await(Event& event, uint32_t count, bool patient) {
    const auto happened = [&] {
        return static_cast<int32_t>(event.count.load(std::memory_order_acquire) - count) >= 0;
    };
    for (int32_t i = 0; i < pauses; ++i) {
        if (happened()) return !aborted();
        relax();
    }
    for (int32_t i = 0; i < YIELDS && pauses >= 0; ++i) {
        if (happened() || aborted()) return !aborted();
        sched_yield();
    }
    return sleep(event, count, patient) && !aborted();
}

bool Ranks::sleep(Event& event, uint32_t count, bool patient) {
    // Counted in sleeps: time during which this process was itself stopped is not held against the others.
    int32_t slept = 0;
    bool happened = false;
    event.sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (!aborted()) {
        const uint32_t seen = event.count.load(std::memory_order_seq_cst);
        if ((happened = static_cast<int32_t>(seen - count) >= 0)) break;
        if (!patient && periods && slept++ >= periods) {
            abort();
            break;
        }
        futex_wait(event.count, seen, patient ? LONG_PERIOD : PERIOD);
    }
    event.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return happened;
}

// Says that this rank has come to the next meeting, and waits for the others.
bool Ranks::meet() {
    raise(segment->arrived[number()], ++met);
    for (int32_t i = 0; i < size; ++i) {
        if (i != rank && !await(segment->arrived[first + i], met, false)) return false;
    }
    return true;
}

namespace {

// Exchanges `count` units, `at_once` at a time. put(slot, range) writes units to this rank's slot, take(number, first,
// range) reads them from those of meeting `number`; a slot begins with unit `first`.
template <typename Put, typename Take>
void exchange(Ranks& ranks, int64_t count, int64_t at_once, const Team& team, const Put& put, const Take& take) {
    for (int64_t first = 0; first < count; first += at_once) {
        const uint32_t number = ranks.met + 1;  // thread 0 counts between the barriers
        const Range mine = share(team, std::min(at_once, count - first));
        const Range range = {first + mine.begin, first + mine.end};
        if (range.begin < range.end) put(ranks.slot(number, ranks.rank), first, range);
        team.barrier();
        if (team.thread == 0) ranks.meet();
        team.barrier();
        if (range.begin < range.end) take(number, first, range);
    }
}

void copy(float* to, const float* from, int64_t count) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof *to);
}

template <int32_t PARTS>
struct Tree {
    static float sum(const float* const* x, int64_t i) {
        return Tree<PARTS / 2>::sum(x, i) + Tree<PARTS / 2>::sum(x + PARTS / 2, i);
    }
};

template <>
struct Tree<1> {
    static float sum(const float* const* x, int64_t i) { return x[0][i]; }
};

template <int32_t PARTS>
void add_parts(float* __restrict out, const float* const* parts, int64_t count) {
    const float* x[PARTS];
    for (int32_t p = 0; p < PARTS; ++p) x[p] = parts[p];
    for (int64_t i = 0; i < count; ++i) out[i] = Tree<PARTS>::sum(x, i);
}

// out[i] = the sum of the parts' floats from `from` of their slots on.
void add_slots(const Ranks& ranks, uint32_t number, int32_t parts, int64_t from, float* out, int64_t count) {
    const float* x[MAX_RANKS];
    for (int32_t p = 0; p < parts; ++p) x[p] = ranks.part_slot(number, p, parts) + from;
    switch (parts) {
        case 8: return add_parts<8>(out, x, count);
        case 4: return add_parts<4>(out, x, count);
        case 2: return add_parts<2>(out, x, count);
        default: return copy(out, x[0], count);
    }
}

// The parts of [first, last) of an array of rows, each within one row: do(row, column, count).
template <typename Do>
void by_row(int64_t first, int64_t last, int64_t width, const Do& act) {
    while (first < last) {
        const int64_t column = first % width, count = std::min(width - column, last - first);
        act(first / width, column, count);
        first += count;
    }
}

}  // namespace

void meet_sum(const Meeting& m, float* out, const float* x, int64_t rows, int64_t width, const float* scales,
              const Team& team) {
    Ranks& ranks = *m.ranks;
    const bool speaks = ranks.speaks(m.parts);
    exchange(
        ranks, rows * width, SLOT_FLOATS, team,
        [&](float* slot, int64_t first, Range r) {
            if (speaks) copy(slot + r.begin - first, x + r.begin, r.end - r.begin);
        },
        [&](uint32_t number, int64_t first, Range r) {
            add_slots(ranks, number, m.parts, r.begin - first, out + r.begin, r.end - r.begin);
            if (!scales) return;
            by_row(r.begin, r.end, width, [&](int64_t row, int64_t column, int64_t count) {
                float* sums = out + row * width + column;
                for (int64_t i = 0; i < count; ++i) sums[i] *= scales[row];
            });
        });
}

void meet_columns(const Meeting& m, float* out, const float* x, int64_t rows, const Team& team) {
    Ranks& ranks = *m.ranks;
    const auto width_of = [&](int32_t part) { return m.borders[part + 1] - m.borders[part]; };
    int64_t widest = 0;
    for (int32_t part = 0; part < m.parts; ++part) widest = std::max(widest, width_of(part));
    const int64_t own = rows * width_of(ranks.part(m.parts));
    const bool speaks = ranks.speaks(m.parts);
    exchange(
        ranks, rows * widest, SLOT_FLOATS, team,
        [&](float* slot, int64_t first, Range r) {
            const int64_t end = std::min(r.end, own);
            if (speaks && r.begin < end) copy(slot + r.begin - first, x + r.begin, end - r.begin);
        },
        [&](uint32_t number, int64_t first, Range r) {
            if (m.lead_only && ranks.rank) return;
            for (int32_t part = 0; part < m.parts; ++part) {
                const int64_t width = width_of(part);
                const float* slot = ranks.part_slot(number, part, m.parts) - first;
                by_row(r.begin, std::min(r.end, rows * width), width, [&](int64_t row, int64_t column, int64_t count) {
                    copy(out + row * m.width + m.borders[part] + column, slot + row * width + column, count);
                });
            }
        });
}

void meet_pick(const Meeting& m, float* out, const float* x, const int64_t* ids, int64_t rows, const Team& team) {
    Ranks& ranks = *m.ranks;
    const int64_t width = m.width;
    const int32_t own = ranks.part(m.parts);
    const bool speaks = ranks.speaks(m.parts);
    const auto part_of = [&](int64_t row) {
        int32_t part = 0;
        while (part + 1 < m.parts && ids[row] >= m.borders[part + 1]) ++part;
        return part;
    };
    exchange(
        ranks, rows * width, SLOT_FLOATS, team,
        [&](float* slot, int64_t first, Range r) {
            by_row(r.begin, r.end, width, [&](int64_t row, int64_t column, int64_t count) {
                const int64_t at = row * width + column;
                if (speaks && part_of(row) == own) copy(slot + at - first, x + at, count);
            });
        },
        [&](uint32_t number, int64_t first, Range r) {
            by_row(r.begin, r.end, width, [&](int64_t row, int64_t column, int64_t count) {
                const int64_t at = row * width + column;
                copy(out + at, ranks.part_slot(number, part_of(row), m.parts) + at - first, count);
            });
        });
}

void meet_experts(const Meeting& m, float* rows_inout, const int64_t* begins, int64_t rows, const Team& team) {
    if (m.parts > 1) return meet_sum(m, rows_inout, rows_inout, rows, m.width, nullptr, team);
    Ranks& ranks = *m.ranks;
    const bool speaks = ranks.speaks(m.shares);
    const auto of_part = [&](int32_t part, Range r) {  // the floats of a part's rows in a range
        return Range{std::max(r.begin, begins[m.borders[part]] * m.width),
                     std::min(r.end, begins[m.borders[part + 1]] * m.width)};
    };
    exchange(
        ranks, rows * m.width, SLOT_FLOATS, team,
        [&](float* slot, int64_t first, Range r) {
            const Range own = of_part(ranks.part(m.shares), r);
            if (speaks && own.begin < own.end) copy(slot + own.begin - first, rows_inout + own.begin, own.end - own.begin);
        },
        [&](uint32_t number, int64_t first, Range r) {
            for (int32_t part = 0; part < m.shares; ++part) {
                const Range theirs = of_part(part, r);
                if (theirs.begin >= theirs.end) continue;
                copy(rows_inout + theirs.begin, ranks.part_slot(number, part, m.shares) + theirs.begin - first,
                     theirs.end - theirs.begin);
            }
        });
}

}  // namespace kvasir

using kvasir::Ranks;

// Bytes of the segment of `size` ranks in each of `stages`. It must be zero at first, and begin at a multiple of 64.
KVASIR_API int64_t kvasir_ranks_bytes(int32_t size, int32_t stages) {
    return kvasir::HEADER + 2 * size * stages * kvasir::SLOT_FLOATS * static_cast<int64_t>(sizeof(float));
}

// A process's view of a segment, for one thread at a time; null on failure. It is rank `rank` of a stage; processes are
// numbered from the last stage to the first, so that number 0 computes the model's results. pauses: spins before a wait
// yields, 0 if there are more threads than the machine has processors, below 0 to sleep at once. periods: tenths of a
// second, not counting those in which this process was stopped, after which a wait for another aborts all; 0 for no
// limit.
KVASIR_API void* kvasir_ranks_open(void* segment, int32_t rank, int32_t size, int32_t stage, int32_t stages,
                                   int32_t pauses, int32_t periods) {
    if (size < 1 || size > kvasir::MAX_RANKS || (size & (size - 1)) || rank < 0 || rank >= size) return nullptr;
    if (stages < 1 || stages > kvasir::MAX_STAGES || stage < 0 || stage >= stages) return nullptr;
    Ranks* ranks = new (std::nothrow) Ranks{};
    if (ranks == nullptr) return nullptr;
    ranks->rank = rank, ranks->size = size, ranks->pauses = pauses, ranks->periods = periods;
    ranks->stage = stage, ranks->stages = stages, ranks->first = (stages - 1 - stage) * size;
    ranks->segment = static_cast<kvasir::Segment*>(segment);
    ranks->slots = reinterpret_cast<float*>(static_cast<char*>(segment) + kvasir::HEADER);
    ranks->slots += 2 * ranks->first * kvasir::SLOT_FLOATS;
    return ranks;
}

KVASIR_API void kvasir_ranks_close(void* ranks) { delete static_cast<Ranks*>(ranks); }

// Ends all waits of all processes, now and later. Any thread may call it.
KVASIR_API void kvasir_ranks_abort(void* ranks) { static_cast<Ranks*>(ranks)->abort(); }

KVASIR_API int32_t kvasir_ranks_aborted(const void* ranks) { return static_cast<const Ranks*>(ranks)->aborted(); }

// Gives the other processes a command, which process 0 has left where they read it. parts: of a step.
KVASIR_API void kvasir_ranks_give(void* context, int32_t parts) {
    Ranks& ranks = *static_cast<Ranks*>(context);
    ranks.segment->planned.count.fetch_add(static_cast<uint32_t>(parts), std::memory_order_release);
    kvasir::raise(ranks.segment->given, ++ranks.given);
}

// Waits until the other processes have carried out all commands. 0, or -1 once they are aborted.
KVASIR_API int32_t kvasir_ranks_settle(void* context) {
    Ranks& ranks = *static_cast<Ranks*>(context);
    for (int32_t i = 1; i < ranks.processes(); ++i) {
        if (!ranks.await(ranks.segment->done[i], ranks.given, false)) return -1;
    }
    return ranks.aborted() ? -1 : 0;
}

// Waits until the stage before this one has left the next part of a step. 0, or -1 once the processes are aborted.
KVASIR_API int32_t kvasir_ranks_receive(void* context) {
    Ranks& ranks = *static_cast<Ranks*>(context);
    return ranks.await(ranks.segment->sent[ranks.stage - 1], ++ranks.received, false) ? 0 : -1;
}

// Says that this stage has left a part for the next one. Only its rank 0 does so.
KVASIR_API void kvasir_ranks_send(void* context) {
    Ranks& ranks = *static_cast<Ranks*>(context);
    kvasir::Event& sent = ranks.segment->sent[ranks.stage];
    kvasir::raise(sent, sent.count.load(std::memory_order_relaxed) + 1);
}

// Waits for the next command, without a limit. 0, or -1 once the ranks are aborted.
KVASIR_API int32_t kvasir_ranks_next(void* context) {
    Ranks& ranks = *static_cast<Ranks*>(context);
    if (!ranks.await(ranks.segment->given, ranks.given + 1, true)) return -1;
    ++ranks.given;
    return 0;
}

// Says that the last command is carried out.
KVASIR_API void kvasir_ranks_done(void* context) {
    Ranks& ranks = *static_cast<Ranks*>(context);
    kvasir::raise(ranks.segment->done[ranks.number()], ranks.given);
}

// What a process has done, for a watchdog on any thread: a number that changes with each meeting, and with each part that
// its stage has computed.
KVASIR_API int64_t kvasir_ranks_progress(const void* context, int32_t number) {
    const Ranks& ranks = *static_cast<const Ranks*>(context);
    const kvasir::Segment& s = *ranks.segment;
    const int64_t sent = s.sent[ranks.stages - 1 - number / ranks.size].count.load(std::memory_order_acquire);
    return sent << 32 | s.arrived[number].count.load(std::memory_order_acquire);
}

// Whether the others may wait for a process: it still owes the last command, its stage has all that it needs from the one
// before, and no other rank of the stage has come to fewer meetings.
KVASIR_API int32_t kvasir_ranks_behind(const void* context, int32_t number) {
    const Ranks& ranks = *static_cast<const Ranks*>(context);
    const kvasir::Segment& s = *ranks.segment;
    const auto read = [](const kvasir::Event& event) { return event.count.load(std::memory_order_acquire); };
    if (read(s.done[number]) == read(s.given)) return 0;
    const int32_t stage = ranks.stages - 1 - number / ranks.size, first = number / ranks.size * ranks.size;
    const uint32_t own = read(s.sent[stage]);
    if (stage > 0 && own != read(s.planned) && own == read(s.sent[stage - 1])) return 0;
    for (int32_t i = first; i < first + ranks.size; ++i) {
        if (static_cast<int32_t>(read(s.arrived[i]) - read(s.arrived[number])) < 0) return 0;
    }
    return 1;
}

// Gives each rank the bytes of all ranks, `bytes` of each, a multiple of 4, one rank's after the other's: out [size,
// bytes]. 0, or -1 once the ranks are aborted.
KVASIR_API int32_t kvasir_ranks_exchange(void* context, void* out, const void* mine, int64_t bytes) {
    Ranks& ranks = *static_cast<Ranks*>(context);
    const int64_t count = bytes / static_cast<int64_t>(sizeof(float));
    float* all = static_cast<float*>(out);
    const float* x = static_cast<const float*>(mine);
    const kvasir::Team alone = {0, 1, nullptr};
    kvasir::exchange(
        ranks, count, kvasir::SLOT_FLOATS, alone,
        [&](float* slot, int64_t first, kvasir::Range r) { kvasir::copy(slot, x + first, r.end - r.begin); },
        [&](uint32_t number, int64_t first, kvasir::Range r) {
            for (int32_t i = 0; i < ranks.size; ++i) {
                kvasir::copy(all + i * count + first, ranks.slot(number, i), r.end - r.begin);
            }
        });
    return ranks.aborted() ? -1 : 0;
}

// The nanoseconds of so many meetings that sum `floats` floats of all ranks, for measurements; -1 once they are aborted.
KVASIR_API int64_t kvasir_ranks_measure(void* context, float* x, int64_t floats, int64_t meetings) {
    Ranks& ranks = *static_cast<Ranks*>(context);
    const kvasir::Meeting m = {&ranks, kvasir::MEET_SUM, ranks.size, 1, 0, floats, {}};
    const kvasir::Team alone = {0, 1, nullptr};
    timespec begun, ended;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int64_t i = 0; i < meetings; ++i) kvasir::meet_sum(m, x, x, 1, floats, nullptr, alone);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    if (ranks.aborted()) return -1;
    return (ended.tv_sec - begun.tv_sec) * int64_t{1'000'000'000} + ended.tv_nsec - begun.tv_nsec;
}

// Lets the system kill this process when the thread that started it ends, even while it is stopped. -1 where it cannot.
KVASIR_API int32_t kvasir_end_with_parent() {
#if defined(__linux__)
    return prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 ? 0 : -1;
#else
    return -1;
#endif
}
