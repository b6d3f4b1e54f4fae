// The most that this processor can do, for limits: multiply-adds and reads per second. No step uses this file.
//
// A loop has only the instruction that the kernels of the active instruction set multiply with, on registers: no loads,
// no scales, and enough sums that none waits for another. So no kernel can be faster.
#include <time.h>

#include <cstring>

#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int64_t ROUNDS = 1 << 18;  // of a loop: about a millisecond
constexpr int PASSES = 20;           // the best counts
constexpr int64_t PIECE = 16 << 20;   // bytes that are read at once: less than a millisecond
constexpr int PIECES = 200;          // the fastest counts

enum Numbers { BYTES, BFLOAT16, FLOAT32 };  // which are multiplied

double seconds(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// A loop, and the multiply-adds of a round; null if it is not known how the kernels multiply.
struct Loop {
    int64_t products;
    void (*run)();
};

#if defined(KVASIR_X86)

#define KVASIR_CLOBBERS                                                                                              \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
        "xmm14", "xmm15"
// What the registers hold does not matter to the time, as a pool's threads flush denormals.
#define KVASIR_LOOP(name, instructions)                                                      \
    void name() {                                                                            \
        for (int64_t i = 0; i < ROUNDS; ++i) asm volatile(instructions ::: KVASIR_CLOBBERS); \
    }
#define KVASIR_WIDE(instruction) /* 16 sums */ \
    ".irp to,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15; " instruction " %%zmm16, %%zmm16, %%zmm\\to; .endr"
#define KVASIR_HALF(instruction) /* 12 sums */ \
    ".irp to,0,1,2,3,4,5,6,7,8,9,10,11; " instruction " %%ymm15, %%ymm15, %%ymm\\to; .endr"

#if !defined(KVASIR_EMULATE_AVX512)
KVASIR_LOOP(bytes_512, KVASIR_WIDE("vpdpbusd"))
KVASIR_LOOP(bfloat16_512, KVASIR_WIDE("vdpbf16ps"))
KVASIR_LOOP(float32_512, KVASIR_WIDE("vfmadd231ps"))
#endif
KVASIR_LOOP(bytes_256, KVASIR_HALF("vpmaddubsw"))
KVASIR_LOOP(float32_256, KVASIR_HALF("vfmadd231ps"))

Loop loop_of(int32_t numbers) {
    const bool wide = std::strcmp(kernels().isa, "avx512") == 0;
#if !defined(KVASIR_EMULATE_AVX512)
    if (wide && numbers == BYTES) return {16 * 64, bytes_512};
    if (wide && numbers == BFLOAT16) return {16 * 32, bfloat16_512};
    if (wide) return {16 * 16, float32_512};
#endif
    if (!wide && std::strcmp(kernels().isa, "avx2") != 0) return {0, nullptr};
    return numbers == BYTES ? Loop{12 * 32, bytes_256} : Loop{12 * 8, float32_256};  // bfloat16 is widened
}

#else

Loop loop_of(int32_t) { return {0, nullptr}; }

#endif

struct Multiplying {
    Loop loop;
    double rate[POOL_MAX];
};

// By the thread's own time: other programs on its processor do not count.
void multiply(const Team& team, void* context) {
    Multiplying& job = *static_cast<Multiplying*>(context);
    double best = 0;
    for (int pass = 0; pass < PASSES; ++pass) {
        const double begun = seconds(CLOCK_THREAD_CPUTIME_ID);
        job.loop.run();
        const double took = seconds(CLOCK_THREAD_CPUTIME_ID) - begun;
        const double rate = static_cast<double>(ROUNDS * job.loop.products) / took;
        if (rate > best) best = rate;
    }
    job.rate[team.thread] = best;
}

// The sum of the words, so that none is left out. Four streams: one alone gets less from the memory.
#define KVASIR_READ(name, target)                                                                         \
    target uint64_t name(const uint64_t* from, int64_t words) {                                           \
        const int64_t quarter = words / 4;                                                                \
        uint64_t sums[8] = {};                                                                            \
        for (int64_t i = 0; i + 8 <= quarter; i += 8) {                                                   \
            for (int64_t j = i; j < i + 8; ++j)                                                           \
                sums[j - i] += from[j] + from[j + quarter] + from[j + 2 * quarter] + from[j + 3 * quarter]; \
        }                                                                                                 \
        uint64_t sum = 0;                                                                                 \
        for (const uint64_t one : sums) sum += one;                                                       \
        return sum;                                                                                       \
    }

KVASIR_READ(read_plain, )
#if defined(KVASIR_X86)
KVASIR_READ(read_avx2, __attribute__((target("avx2"))))
#endif

struct Reading {
    const uint64_t* data;
    int64_t words, repeats;
    uint64_t (*read)(const uint64_t* from, int64_t words);
    volatile uint64_t sink;
};

void read_share(const Team& team, void* context) {
    Reading& job = *static_cast<Reading*>(context);
    const Range words = share(team, job.words, 32);
    uint64_t sum = 0;
    for (int64_t i = 0; i < job.repeats; ++i) sum += job.read(job.data + words.begin, words.end - words.begin);
    if (sum == 1) job.sink = sum;
}

}  // namespace
}  // namespace kvasir

// Multiply-adds per second of `threads` threads at once, each in its own processor time; 0 if it is not known for the
// active instruction set, and -1 if the threads cannot be created. numbers: 0 bytes, 1 bfloat16, 2 float32.
KVASIR_API double kvasir_multiply_rate(int32_t numbers, int32_t threads) {
    static kvasir::Multiplying job;  // one measurement at a time
    job.loop = kvasir::loop_of(numbers);
    if (job.loop.run == nullptr) return 0;
    kvasir::Pool* pool = kvasir::pool_create(threads, false);
    if (pool == nullptr) return -1;
    kvasir::pool_run(pool, kvasir::multiply, &job);
    kvasir::pool_destroy(pool);
    double total = 0;
    for (int32_t i = 0; i < threads; ++i) total += job.rate[i];
    return total;
}

// Bytes per second that `threads` threads read at once, the most over pieces of the data; nbytes is at least 1. Data that
// fit the caches come from there, as weights of that size would. -1 if the threads cannot be created.
KVASIR_API double kvasir_read_rate(const uint64_t* data, int64_t nbytes, int32_t threads) {
    kvasir::Pool* pool = kvasir::pool_create(threads, false);
    if (pool == nullptr) return -1;
    const int64_t piece = nbytes < kvasir::PIECE ? nbytes : kvasir::PIECE, pieces = nbytes / piece;
    kvasir::Reading job = {data, piece / 8, kvasir::PIECE / piece, kvasir::read_plain, 0};
#if defined(KVASIR_X86)
    if (std::strcmp(kvasir::kernels().isa, "portable") != 0) job.read = kvasir::read_avx2;
#endif
    double best = 0;
    for (int i = 0; i < kvasir::PIECES; ++i) {
        job.data = data + i % pieces * (piece / 8);
        const double begun = kvasir::seconds(CLOCK_MONOTONIC);
        kvasir::pool_run(pool, kvasir::read_share, &job);
        const double took = kvasir::seconds(CLOCK_MONOTONIC) - begun;
        const double rate = static_cast<double>(piece * job.repeats) / took;
        if (rate > best) best = rate;
    }
    kvasir::pool_destroy(pool);
    return best;
}
