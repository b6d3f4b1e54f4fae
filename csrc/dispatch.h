// The active kernels, and the floating-point mode in which they compute.
#pragma once

#include "kernels.h"

#if defined(KVASIR_X86)
#include <xmmintrin.h>
#endif

namespace kvasir {

const Kernels& kernels();  // the active table (dispatch.cpp)

// Flush denormals in and out, round to nearest, mask all exceptions: for the duration of one call, or of a thread.
#if defined(KVASIR_X86)

class FloatMode {
  public:
    FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
    ~FloatMode() { _mm_setcsr(saved_); }
    FloatMode(const FloatMode&) = delete;

  private:
    unsigned saved_;
};

#elif defined(__aarch64__)

class FloatMode {
  public:
    FloatMode() {
        const uint64_t flush = uint64_t{1} << 24;
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(flush));
    }
    ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
    FloatMode(const FloatMode&) = delete;

  private:
    uint64_t saved_;
};

#else

struct FloatMode {};  // this processor computes with denormals

#endif

}  // namespace kvasir
