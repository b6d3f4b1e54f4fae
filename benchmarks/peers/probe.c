/* What the machine gives just now, as one line of JSON: bytes read per second, and multiply-adds per second that the
 * vector units do on int8 and on bf16 (0 where they have no such instruction; matrix units such as AMX do not count).
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

static void *multiply_int8(void *given) {
    struct part *p = given;
#ifdef __AVX512VNNI__
    __m512i sums[CHAINS], x = _mm512_set1_epi8((char)p->count);
    for (int j = 0; j < CHAINS; j++) sums[j] = x;
    for (uint64_t i = 0; i < ROUNDS / CHAINS; i++)
        for (int j = 0; j < CHAINS; j++) __asm__("vpdpbusd %1, %1, %0" : "+v"(sums[j]) : "v"(x));
    for (int j = 0; j < CHAINS; j++) p->sink += (uint64_t)_mm512_reduce_add_epi32(sums[j]);
#elif defined(__AVXVNNI__)
    __m256i sums[CHAINS], x = _mm256_set1_epi8((char)p->count);
    for (int j = 0; j < CHAINS; j++) sums[j] = x;
    for (uint64_t i = 0; i < ROUNDS / CHAINS; i++)
        for (int j = 0; j < CHAINS; j++) __asm__("{vex} vpdpbusd %1, %1, %0" : "+x"(sums[j]) : "x"(x));
    for (int j = 0; j < CHAINS; j++) p->sink += (uint64_t)_mm256_extract_epi32(sums[j], 0);
#endif
    return p;
}

static void *multiply_bf16(void *given) {
    struct part *p = given;
#ifdef __AVX512BF16__
    __m512 sums[CHAINS], x = _mm512_setzero_ps();
    for (int j = 0; j < CHAINS; j++) sums[j] = x;
    for (uint64_t i = 0; i < ROUNDS / CHAINS; i++)
        for (int j = 0; j < CHAINS; j++) __asm__("vdpbf16ps %1, %1, %0" : "+v"(sums[j]) : "v"(x));
    for (int j = 0; j < CHAINS; j++) p->sink += (uint64_t)_mm512_reduce_add_ps(sums[j]);
#endif
    return p;
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
    double read = (double)(per * 8) * threads / best(read_part, parts, threads), int8 = 0, bf16 = 0;
    double done = (double)(ROUNDS / CHAINS * CHAINS) * threads;
#ifdef __AVX512VNNI__
    int8 = done * 64 / best(multiply_int8, parts, threads);
#elif defined(__AVXVNNI__)
    int8 = done * 32 / best(multiply_int8, parts, threads);
#endif
#ifdef __AVX512BF16__
    bf16 = done * 32 / best(multiply_bf16, parts, threads);
#endif
    for (int i = 0; i < threads; i++) sink += parts[i].sink;
    fprintf(stderr, "%llu\n", (unsigned long long)sink);
    printf("{\"bytes_per_s\": %.6g, \"int8_macs_per_s\": %.6g, \"bf16_macs_per_s\": %.6g}\n", read, int8, bf16);
    return 0;
}
