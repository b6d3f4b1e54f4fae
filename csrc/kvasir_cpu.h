// The C ABI of libkvasir_cpu: what Python (ctypes) may call. Here stand the version, the choice of the instruction set
// and the first row kernel; the other calls stand with their contracts in abi_*.cpp, pool.cpp and program.cpp, their
// structures in the headers of their families.
//
// Pointers are raw, arrays are dense and row-major, sizes are counted in elements. Nothing throws, and but for pools
// nothing allocates or keeps a pointer after it returns. Every call rounds to nearest and, but for the sampler, flushes
// denormals to zero, whatever the calling thread had set, and leaves that setting as it was.
//
// The contract of every kernel: the bits of a row depend on that row, its past and the weights alone, not on the
// instruction set, the thread or the rows beside it (any NaN counts as the same NaN).
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define KVASIR_API extern "C" __declspec(dllexport)
#else
#define KVASIR_API extern "C" __attribute__((visibility("default")))
#endif

// Raised whenever a signature or the meaning of an argument changes; the loader refuses any other.
constexpr int32_t KVASIR_ABI_VERSION = 7;

KVASIR_API int32_t kvasir_abi_version();

// SHA-256, in hexadecimal, of the sources and the build description that the library was made from. Where it differs,
// results may: it guards what is stored.
KVASIR_API const char* kvasir_sources_digest();

// What of interest this processor and its operating system offer, as words between spaces ("avx2 fma avx512f").
KVASIR_API const char* kvasir_cpu_features();

// The instruction set in force: "portable", "avx2" or "avx512". At first the best this machine can run.
KVASIR_API const char* kvasir_isa_name();

// Choose the instruction set by its place in the list above (0 = portable, upwards), -1 for the best. Returns the
// place now in force, or -1 without any change where this machine cannot run it. Not to be called during a kernel.
KVASIR_API int32_t kvasir_set_isa(int32_t place);

// RMSNorm of float32 rows (Zhang and Sennrich, 2019): out = x * (1 / sqrt(mean(x^2) + eps)) * weight.
// x, out: [rows, cols]; weight: [cols]. out may be x. cols is at least 1 and below 2^24.
// Order of the sum: lane l of 16 adds x[l]^2, x[l+16]^2, ... by fused multiply-adds in ascending order; lanes l and
// l+8 are added, then l and l+4, l+2, l+1.
KVASIR_API void kvasir_rms_norm_f32(float* out, const float* x, const float* weight, int64_t rows, int64_t cols,
                                    float eps);
