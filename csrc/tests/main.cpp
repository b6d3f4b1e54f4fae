// Tests every kernel on every instruction set that this machine supports, with odd shapes and hostile values.
#include "../kvasir_cpu.h"
#include "check.h"

int main() {
    for (int32_t place = 0; kvasir_set_isa(place) == place; ++place) {
        test_rows();
        test_linear();
        test_attention();
        test_sampler();
        test_program();
        test_delta();
        test_short_conv();
        test_scan();
        test_streams();
        std::printf("kernels on %s: passed\n", kvasir_isa_name());
    }
    return 0;
}
