/* What the machine gives just now, as one line of JSON: bytes read per second, and multiply-adds per second that the
 * vector units do on int8, on int8 by 4 bits, and on bf16 (0 if unknown; matrix units such as AMX do not count).
 *
 * Each is the fastest exact sequence on registers that we know. Without dot products of bytes that is vpmaddubsw, whose
 * sums of 16 bits are widened at once; those of 4-bit weights (at most 15 * 127 * 2 each) only after eight. Without bf16,
 * vfmadd231ps on float32.
 *
 * usage: probe THREADS [MIB]      each thread reads its part of MIB in four streams: one alone gets half as much
 */
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define PASSES 5
#define ROUNDS 20000000ull
#define CHAINS 12 /* sums that do not wait for each other */

struct part {
    const uint64_t *data;
    size_t count; /* words */
    uint64_t sink;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *read_part(void *given) {
    struct part *p = given;
    size_t quarter = p->count / 4;
    const uint64_t *a = p->data, *b = a + quarter, *c = b + quarter, *d = c + quarter;
    uint64_t sums[8] = {0};
    for (size_t i = 0; i + 8 <= quarter; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += a[i + j] + b[i + j] + c[i + j] + d[i + j];
    for (int j = 0; j < 8; j++) p->sink += sums[j];
    return 0;
}

/* Runs STEP for each of the CHAINS sums, ROUNDS times in total. */
#define MULTIPLY(VECTOR, START, STEP)                                        \
    VECTOR sums[CHAINS], x = START;                                          \
    for (int j = 0; j < CHAINS; j++) sums[j] = x;                            \
    for (uint64_t i = 0; i < ROUNDS / CHAINS; i++) {                         \
        _Pragma("GCC unroll 12") for (int j = 0; j < CHAINS; j++) STEP;      \
    }                                                                        \
    for (int j = 0; j < CHAINS; j++) __asm__ volatile("" : : "x"(sums[j]));

static void *multiply_int8(void *given) {
#ifdef __AVX512VNNI__
    MULTIPLY(__m512i, _mm512_set1_epi8((char)(size_t)given),
             __asm__("vpdpbusd %1, %1, %0" : "+v"(sums[j]) : "v"(x)))
#elif defined(__AVXVNNI__)
    MULTIPLY(__m256i, _mm256_set1_epi8((char)(size_t)given),
             __asm__("{vex} vpdpbusd %1, %1, %0" : "+x"(sums[j]) : "x"(x)))
#elif defined(__AVX2__)
    __m256i y;
    MULTIPLY(__m256i, _mm256_set1_epi8((char)(size_t)given),
             __asm__("vpmaddubsw %2, %2, %1\n\tvpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0"
                     : "+x"(sums[j]), "=&x"(y) : "x"(x)))
#endif
    return given;
}

/* Each step multiplies eight vectors. */
static void *multiply_int4(void *given) {
#ifdef __AVX2__
#define ADD "vpmaddubsw %3, %3, %2\n\tvpaddw %2, %1, %1\n\t"
    __m256i y, z;
    MULTIPLY(__m256i, _mm256_set1_epi8((char)(size_t)given),
             __asm__("vpmaddubsw %3, %3, %1\n\t" ADD ADD ADD ADD ADD ADD ADD "vpmaddwd %3, %1, %1\n\tvpaddd %1, %0, %0"
                     : "+x"(sums[j]), "=&x"(y), "=&x"(z) : "x"(x)))
#endif
    return given;
}

static void *multiply_bf16(void *given) {
#ifdef __AVX512BF16__
    MULTIPLY(__m512, _mm512_setzero_ps(), __asm__("vdpbf16ps %1, %1, %0" : "+v"(sums[j]) : "v"(x)))
#elif defined(__FMA__)
    MULTIPLY(__m256, _mm256_setzero_ps(), __asm__("vfmadd231ps %1, %1, %0" : "+x"(sums[j]) : "x"(x)))
#endif
    return given;
}

/* Seconds of the best pass of all threads. */
static double best(void *(*work)(void *), struct part *parts, int threads) {
    double least = 1e30;
    pthread_t ids[256];
    for (int pass = 0; pass < PASSES; pass++) {
        double begun = now();
        for (int i = 1; i < threads; i++)
            if (pthread_create(&ids[i], 0, work, &parts[i])) exit(1);
        work(&parts[0]);
        for (int i = 1; i < threads; i++) pthread_join(ids[i], 0);
        double took = now() - begun;
        if (took < least) least = took;
    }
    return least;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1, mib = argc > 2 ? atoi(argv[2]) : 512;
    if (threads < 1 || threads > 256 || mib < 1) return 2;
    size_t words = ((size_t)mib << 20) / 8, per = words / (size_t)threads;
    uint64_t *data = malloc(words * 8), sink = 0;
    if (!data) return 1;
    for (size_t i = 0; i < words; i++) data[i] = i;
    struct part parts[256];
    for (int i = 0; i < threads; i++) parts[i] = (struct part){data + (size_t)i * per, per, 0};
    double read = (double)(per * 8) * threads / best(read_part, parts, threads), int8 = 0, int4, bf16 = 0;
    double done = (double)(ROUNDS / CHAINS * CHAINS) * threads;
#ifdef __AVX512VNNI__
    int8 = done * 64 / best(multiply_int8, parts, threads);
#elif defined(__AVXVNNI__) || defined(__AVX2__)
    int8 = done * 32 / best(multiply_int8, parts, threads);
#endif
    int4 = int8;
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
    int4 = done * 32 * 8 / best(multiply_int4, parts, threads);
#endif
#ifdef __AVX512BF16__
    bf16 = done * 32 / best(multiply_bf16, parts, threads);
#elif defined(__FMA__)
    bf16 = done * 8 / best(multiply_bf16, parts, threads);
#endif
    for (int i = 0; i < threads; i++) sink += parts[i].sink;
    fprintf(stderr, "%llu\n", (unsigned long long)sink);
    printf("{\"bytes_per_s\": %.6g, \"int8_macs_per_s\": %.6g, \"int4_macs_per_s\": %.6g, \"bf16_macs_per_s\": %.6g}\n", read, int8,
           int4, bf16);
    return 0;
}
