// Faults on purpose: the test of the native harness builds this target and sees each of them reported. What is behind
// the word is found only by following what the code compares.
#include "../../csrc/fuzz/input.h"

void fuzz_planted(const uint8_t* data, size_t size);

namespace {

using namespace kvasir_fuzz;

volatile int32_t sink, greatest = std::numeric_limits<int32_t>::max();

void fail(uint8_t kind) {
    switch (kind) {
        case 'h': {
            const std::vector<int32_t> heap(3);
            sink = heap.data()[greatest % 4];
            break;
        }
        case 'g': {
            Guarded<int32_t> guarded(3);
            sink = guarded[greatest % 4];
            break;
        }
        case 'u': sink = greatest + 1; break;
        case 'r': require(false, "planted"); break;
        case 't':
            while (greatest) {
            }
    }
}

}  // namespace

void fuzz_planted(const uint8_t* data, size_t size) {
    constexpr char WORD[] = "fault";
    for (size_t i = 0; i < 5; ++i) {
        if (i >= size || data[i] != static_cast<uint8_t>(WORD[i])) return;
    }
    fail(size > 5 ? data[5] : 'h');
}

#define KVASIR_TARGET fuzz_planted
#include "../../csrc/fuzz/entry.cpp"
