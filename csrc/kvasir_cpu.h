// The C ABI of libkvasir_cpu: what Python (ctypes) may call. This header has the version, the choice of the instruction
// set and the first row kernel; the other calls and their contracts are in abi_*.cpp, pool.cpp and program.cpp, their
// structures in the headers of their families.
//
// Pointers are raw, arrays are dense and row-major, sizes are counted in elements. Nothing throws, and except for pools
// nothing allocates memory or keeps a pointer after it returns. Every call rounds to nearest and, except for the
// sampler, flushes denormals to zero, whatever the calling thread's settings, which it restores.
//
// The contract of every kernel: the bits of a row depend only on that row, its past and the weights, not on the
// instruction set, the thread or the other rows (any NaN counts as the same NaN).
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define KVASIR_API extern "C" __declspec(dllexport)
#else
#define KVASIR_API extern "C" __attribute__((visibility("default")))
#endif

// Raised whenever a signature or the meaning of an argument changes; the loader refuses any other.
constexpr int32_t KVASIR_ABI_VERSION = 31;

KVASIR_API int32_t kvasir_abi_version();

// SHA-256, in hexadecimal, of the sources and the build description that the library was made from. If it differs,
// results may differ too: it guards stored blocks.
KVASIR_API const char* kvasir_sources_digest();

// The relevant features of this processor and its operating system, separated by spaces ("avx2 fma avx512f").
KVASIR_API const char* kvasir_cpu_features();

// The active instruction set: "portable", "avx2" or "avx512". Initially the best that this machine can run.
KVASIR_API const char* kvasir_isa_name();

// Selects the instruction set by its index in the list above (0 = portable), -1 for the best. Returns the active index,
// or -1 and changes nothing if this machine cannot run it. Must not be called while a kernel runs.
KVASIR_API int32_t kvasir_set_isa(int32_t place);

// Selects how many panels of a matrix a tile of many rows has on AVX-512, 1 or 2, for tests and measurements; 0 for what
// is faster on this processor, as initially. Returns the active number, or -1 and changes nothing if it is another. Must
// not be called while a kernel runs.
KVASIR_API int32_t kvasir_set_tile_panels(int32_t count);

// RMSNorm of float32 rows (Zhang and Sennrich, 2019): out = x * (1 / sqrt(mean(x^2) + eps)) * weight.
// x, out: [rows, cols]; weight: [cols], or null for a factor of 1. out may be x. cols is at least 1 and below 2^24.
// Order of the sum: lane l of 16 adds x[l]^2, x[l+16]^2, ... by fused multiply-adds in ascending order; lanes l and
// l+8 are added, then l and l+4, l+2, l+1.
KVASIR_API void kvasir_rms_norm_f32(float* out, const float* x, const float* weight, int64_t rows, int64_t cols,
                                    float eps);
