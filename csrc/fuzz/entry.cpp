// The entry point of libFuzzer. KVASIR_TARGET is defined as the function of one target.
#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    KVASIR_TARGET(data, size);
    return 0;
}
