// All kernels for one instruction set. CMake compiles this file once per set, with that set's flags and KVASIR_ISA
// defined as its name; a new kernel family is one more header here and one more row in kernels.h.
#include "kernels.h"
#include "norm.h"

#define KVASIR_TEXT_OF(name) #name
#define KVASIR_TEXT(name) KVASIR_TEXT_OF(name)

namespace kvasir {
namespace KVASIR_ISA {

extern const Kernels kernels = {
    KVASIR_TEXT(KVASIR_ISA),
    rms_norm_f32,
};

}  // namespace KVASIR_ISA
}  // namespace kvasir
