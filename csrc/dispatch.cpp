// Selects the table of kernels and the shape of tiles: detects the processor and its features once, at load.
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "tile_panels.h"

#include <atomic>

#if defined(KVASIR_X86)
#include <cpuid.h>
#endif

namespace kvasir {
namespace {

#if defined(KVASIR_X86)

struct Feature {
    const char* name;
    bool present;
};

// __builtin_cpu_supports of older clang versions does not accept "f16c". The operating system's part (saving the wider
// registers) is covered by the check for AVX2.
bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

// The builtin also checks that the operating system saves the wider registers.
#define KVASIR_FEATURE(name) {name, (__builtin_cpu_init(), __builtin_cpu_supports(name) != 0)}

const Feature features[] = {
    KVASIR_FEATURE("avx2"),       KVASIR_FEATURE("fma"),      {"f16c", has_f16c()},
    KVASIR_FEATURE("avx512f"),    KVASIR_FEATURE("avx512bw"), KVASIR_FEATURE("avx512dq"),
    KVASIR_FEATURE("avx512vl"),   KVASIR_FEATURE("avx512vnni"), KVASIR_FEATURE("avx512bf16"),
#if defined(KVASIR_EMULATE_AVX512)
    {"emulated-avx512", true},
#endif
};
constexpr int AVX2_NEEDS = 3;  // this many features from the start of the list
#if defined(KVASIR_EMULATE_AVX512)
constexpr int AVX512_NEEDS = AVX2_NEEDS;  // compiled to instructions of AVX2 (csrc/tests/emulated_avx512.h)
#else
constexpr int AVX512_NEEDS = 9;
#endif

bool has_first(int count) {
    for (int i = 0; i < count; ++i) {
        if (!features[i].present) return false;
    }
    return true;
}

const Kernels* const tables[] = {&portable::kernels, &avx2::kernels, &avx512::kernels};

int best_place() { return has_first(AVX512_NEEDS) ? 2 : has_first(AVX2_NEEDS) ? 1 : 0; }

// In tiles of one panel each vpdpbusd loads its activations, in tiles of two every second. AMD's processors load no more
// vectors per clock than they multiply, and panels are loaded, too.
int32_t best_panels() {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") ? 2 : 1;
}

#else

const Kernels* const tables[] = {&portable::kernels};

int best_place() { return 0; }
int32_t best_panels() { return 1; }

#endif

std::atomic<const Kernels*> current{tables[best_place()]};
std::atomic<int32_t> current_panels{best_panels()};

struct FeatureText {
    char text[256];

    FeatureText() {
        char* end = text;
#if defined(KVASIR_X86)
        for (const Feature& feature : features) {
            if (!feature.present) continue;
            if (end != text) *end++ = ' ';
            for (const char* letter = feature.name; *letter; ++letter) *end++ = *letter;
        }
#endif
        *end = '\0';
    }
};
const FeatureText feature_text;

}  // namespace

const Kernels& kernels() { return *current.load(std::memory_order_relaxed); }

int32_t tile_panels() { return current_panels.load(std::memory_order_relaxed); }

}  // namespace kvasir

int32_t kvasir_abi_version() { return KVASIR_ABI_VERSION; }

const char* kvasir_cpu_features() { return kvasir::feature_text.text; }

const char* kvasir_isa_name() { return kvasir::current.load()->isa; }

int32_t kvasir_set_isa(int32_t place) {
    const int best = kvasir::best_place();
    if (place < -1 || place > best) return -1;
    const int chosen = place == -1 ? best : place;
    kvasir::current.store(kvasir::tables[chosen]);
    return chosen;
}

int32_t kvasir_set_tile_panels(int32_t count) {
    if (count < 0 || count > 2) return -1;
    kvasir::current_panels.store(count == 0 ? kvasir::best_panels() : count);
    return kvasir::current_panels.load();
}
