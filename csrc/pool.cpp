// The pool has one primitive: a signal that threads raise and wait for. One signal starts a run, another reports its
// end to a caller that is not a thread of the pool, and a barrier is a signal that the last thread to arrive raises.
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <initializer_list>
#include <new>

#include "dispatch.h"
#include "kvasir_cpu.h"

namespace kvasir {

// A waiting thread first spins, then yields, then sleeps. Spinning for some ten microseconds covers the unequal shares
// of one step. Yielding gives the processor to a thread that was descheduled. An idle pool sleeps within a millisecond.
// With more threads than processors some thread is always descheduled, so no thread spins.
constexpr int PAUSES = 1000;
constexpr int YIELDS = 1000;

static void relax() {
#if defined(KVASIR_X86)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // "yield" is a no-op on most processors
#endif
}

// A repeatable event with a counter. `seen` is the count before the raise that a thread waits for.
struct Signal {
    alignas(64) std::atomic<uint32_t> raised;
    std::atomic<int32_t> sleepers;
    pthread_mutex_t lock;
    pthread_cond_t up;

    void open();
    void close();
    void raise();
    void wait(uint32_t seen, int32_t pauses, int32_t yields);
    void sleep(uint32_t seen);
};

void Signal::open() {
    pthread_mutex_init(&lock, nullptr);
    pthread_cond_init(&up, nullptr);
}

void Signal::close() {
    pthread_cond_destroy(&up);
    pthread_mutex_destroy(&lock);
}

void Signal::raise() {
    // This increment and load, and those in sleep(), are sequentially consistent: either the sleeping thread sees the
    // new count, or this thread sees the sleeper.
    raised.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&up);
    pthread_mutex_unlock(&lock);
}

void Signal::wait(uint32_t seen, int32_t pauses, int32_t yields) {
    for (int32_t i = 0; i < pauses; ++i) {
        if (raised.load(std::memory_order_acquire) != seen) return;
        relax();
    }
    for (int32_t i = 0; i < yields; ++i) {
        if (raised.load(std::memory_order_acquire) != seen) return;
        sched_yield();
    }
    sleep(seen);
}

void Signal::sleep(uint32_t seen) {
    pthread_mutex_lock(&lock);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (raised.load(std::memory_order_seq_cst) == seen) pthread_cond_wait(&up, &lock);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    pthread_mutex_unlock(&lock);
}

struct alignas(64) Worker {
    Pool* pool;
    pthread_t handle;
    int32_t thread;
    int32_t processor;  // to run on; -1 for any
    uint64_t draws;     // that this thread has begun
};

struct Pool {
    int32_t threads;
    int32_t first;   // thread number of the first worker: 1, or 0 if the caller is not in the team
    int32_t pauses;  // spins of a thread before it yields
    int32_t caller_pauses;  // spins of a caller that is not in the team
    Worker* workers;  // [threads]; entries before `first` are unused
    void (*body)(const Team& team, void* context);
    void* context;
    uint32_t awaited;  // the count of `done` at the end of the last started run
    Signal begin, all, done;
    alignas(64) std::atomic<int32_t> arrived;  // threads that have reached the barrier `all`
    alignas(64) std::atomic<uint64_t> drawn;   // the last draw's number, and in the lower 16 bits its pieces so far

    void meet();
};

void Pool::meet() {
    const uint32_t seen = all.raised.load(std::memory_order_relaxed);  // stable until this thread arrives
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < threads) return all.wait(seen, pauses, YIELDS);
    arrived.store(0, std::memory_order_relaxed);
    all.raise();
}

void Team::barrier() const {
    if (threads > 1) pool->meet();
}

uint64_t Team::next_draw() const { return ++pool->workers[thread].draws; }

int64_t Team::draw(uint64_t number, int64_t count) const {
    uint64_t seen = pool->drawn.load(std::memory_order_relaxed);
    while (true) {
        if (seen >> 16 > number) return -1;  // others went on, since nothing was left
        const uint64_t piece = seen >> 16 == number ? seen & 0xffff : 0;
        if (static_cast<int64_t>(piece) >= count) return -1;
        const uint64_t taken = number << 16 | (piece + 1);
        if (pool->drawn.compare_exchange_weak(seen, taken, std::memory_order_relaxed)) return static_cast<int64_t>(piece);
    }
}

#if defined(__linux__)

// The number of processors that the caller may run on.
static int32_t count_processors() {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : CPU_SETSIZE;
}

// Assigns these processors to the workers in turn.
static void choose_processors(Worker* workers, int32_t count) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    int32_t processor = -1;
    for (int32_t i = 0; i < count; ++i) {
        do {
            processor = (processor + 1) % CPU_SETSIZE;
        } while (!CPU_ISSET(processor, &allowed));
        workers[i].processor = processor;
    }
}

static void stay_on(int32_t processor) {
    if (processor < 0) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(processor, &one);
    sched_setaffinity(0, sizeof one, &one);  // on failure the thread runs on any processor
}

#else

static int32_t count_processors() { return static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN)); }
static void choose_processors(Worker*, int32_t) {}
static void stay_on(int32_t) {}

#endif

static void* work(void* argument) {
    const Worker& worker = *static_cast<Worker*>(argument);
    Pool* pool = worker.pool;
    stay_on(worker.processor);
    const FloatMode mode;
    const Team team{worker.thread, pool->threads, pool};
    for (uint32_t seen = 0;; ++seen) {
        pool->begin.wait(seen, pool->pauses, YIELDS);
        if (pool->body == nullptr) return nullptr;
        pool->body(team, pool->context);
        team.barrier();
        if (worker.thread == 0) pool->done.raise();
    }
}

// Stops the threads below `started`, the only ones that exist, and frees the pool.
static void end(Pool* pool, int32_t started) {
    pool->body = nullptr;
    pool->begin.raise();
    for (int32_t i = pool->first; i < started; ++i) pthread_join(pool->workers[i].handle, nullptr);
    for (Signal* signal : {&pool->begin, &pool->all, &pool->done}) signal->close();
    delete[] pool->workers;
    delete pool;
}

Pool* pool_create(int32_t threads, bool pin, bool apart) {
    if (threads < 1 || threads > POOL_MAX) return nullptr;
    Pool* pool = new (std::nothrow) Pool{};
    Worker* workers = new (std::nothrow) Worker[threads];
    if (pool == nullptr || workers == nullptr) {
        delete pool;
        delete[] workers;
        return nullptr;
    }
    const int32_t processors = count_processors();
    pool->threads = threads;
    pool->first = apart ? 0 : 1;
    pool->pauses = threads <= processors ? PAUSES : 0;
    pool->caller_pauses = threads < processors ? PAUSES : 0;
    pool->workers = workers;
    for (Signal* signal : {&pool->begin, &pool->all, &pool->done}) signal->open();
    for (int32_t i = 0; i < threads; ++i) workers[i] = {pool, {}, i, -1, 0};
    if (pin) choose_processors(workers, threads);
    for (int32_t i = pool->first; i < threads; ++i) {
        if (pthread_create(&workers[i].handle, nullptr, work, &workers[i]) == 0) continue;
        end(pool, i);
        return nullptr;
    }
    return pool;
}

void pool_destroy(Pool* pool) {
    if (pool == nullptr) return;
    pool_wait(pool);
    end(pool, pool->threads);
}

void pool_start(Pool* pool, void (*body)(const Team& team, void* context), void* context) {
    pool->body = body;
    pool->context = context;
    pool->begin.raise();
    ++pool->awaited;
    if (pool->first == 0) return;
    const FloatMode mode;
    const Team team{0, pool->threads, pool};
    body(team, context);
    team.barrier();
}

void pool_wait(Pool* pool) {
    // A caller without a processor of its own sleeps immediately: spinning would take time from the pool's threads.
    if (pool->first == 0) pool->done.wait(pool->awaited - 1, pool->caller_pauses, 0);
}

void pool_run(Pool* pool, void (*body)(const Team& team, void* context), void* context) {
    pool_start(pool, body, context);
    pool_wait(pool);
}

namespace {

// Each round, every thread writes a number, passes a barrier and reads the numbers of all threads. Rounds alternate
// between two slots, since other threads may still read those of the previous round.
struct Selftest {
    int64_t rounds;
    int64_t (*written)[2];  // [threads]
    int64_t* totals;        // [threads]
};

void selftest(const Team& team, void* context) {
    const Selftest& test = *static_cast<const Selftest*>(context);
    int64_t total = 0;
    for (int64_t round = 0; round < test.rounds; ++round) {
        test.written[team.thread][round % 2] = round * team.threads + team.thread;
        team.barrier();
        for (int32_t i = 0; i < team.threads; ++i) total += test.written[i][round % 2];
    }
    test.totals[team.thread] = total;
}

}  // namespace
}  // namespace kvasir

// pool_create for the C ABI; null on failure.
KVASIR_API void* kvasir_pool_create(int32_t threads, int32_t pin, int32_t apart) {
    return kvasir::pool_create(threads, pin != 0, apart != 0);
}

KVASIR_API void kvasir_pool_destroy(void* pool) { kvasir::pool_destroy(static_cast<kvasir::Pool*>(pool)); }

// One run with `rounds` barriers. In each round every thread reads what all threads wrote. Returns the sum of all
// reads, n * (n^2 r (r - 1) / 2 + r n (n - 1) / 2) for n threads and r rounds, or -1 if out of memory.
KVASIR_API int64_t kvasir_pool_selftest(void* address, int64_t rounds) {
    kvasir::Pool* pool = static_cast<kvasir::Pool*>(address);
    kvasir::Selftest test{rounds, new (std::nothrow) int64_t[pool->threads][2],
                          new (std::nothrow) int64_t[pool->threads]};
    int64_t total = -1;
    if (test.written != nullptr && test.totals != nullptr) {
        kvasir::pool_run(pool, kvasir::selftest, &test);
        total = 0;
        for (int32_t i = 0; i < pool->threads; ++i) total += test.totals[i];
    }
    delete[] test.written;
    delete[] test.totals;
    return total;
}
