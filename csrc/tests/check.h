// Shared by the kernels' tests, which run under the address and undefined-behaviour sanitizers. Every array ends at an
// inaccessible page, so that vector instructions fault if they read or write past its end.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace kvasir_test {

// An array that ends at the start of an inaccessible page.
template <typename T>
class Guarded {
  public:
    explicit Guarded(int64_t count) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t used = (static_cast<size_t>(count) * sizeof(T) + page - 1) / page * page;
        size_ = used + page;
        base_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0));
        if (base_ == MAP_FAILED || mprotect(base_ + used, page, PROT_NONE) != 0) std::abort();
        data = reinterpret_cast<T*>(base_ + used) - count;
    }
    Guarded(const Guarded&) = delete;
    ~Guarded() { munmap(base_, size_); }

    T& operator[](int64_t i) { return data[i]; }

    T* data;

  private:
    char* base_;
    size_t size_;
};

// Whether all bits are equal; all NaNs count as equal.
inline bool same(const float* a, const float* b, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (!(std::isnan(a[i]) && std::isnan(b[i])) && std::memcmp(a + i, b + i, sizeof(float)) != 0) return false;
    }
    return true;
}

inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// Fails if the floats are not those of the first instruction set, where the same tests gave theirs in the same order.
void require_first_bits(const float* found, int64_t count, const char* what);

}  // namespace kvasir_test

// One for each family of kernels; each tests the active instruction set (kvasir_set_isa).
void test_rows();
void test_linear();
void test_attention();
void test_sampler();
void test_program();
void test_delta();
void test_indexer();
void test_short_conv();
void test_scan();
void test_streams();
void test_wkv();
void test_ranks();
