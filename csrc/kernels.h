// The table of kernels, filled once per instruction set (isa.cpp) and chosen at run time (dispatch.cpp).
#pragma once

#include <cstdint>

namespace kvasir {

struct Kernels {
    const char* isa;
    void (*rms_norm_f32)(float* out, const float* x, const float* weight, int64_t rows, int64_t cols, float eps);
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace kvasir
