#!/usr/bin/env bash
# Tests the AVX-512 kernels on a machine without AVX-512: builds the library with them emulated
# (csrc/tests/emulated_avx512.h) in build/emulate, checks that it has no instruction of AVX-512, and compares bits.
#     scripts/emulate.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
cmake=$(dirname "$python")/cmake
build=$PWD/build/emulate

skip() {
  echo "emulate: 1 skipped: $1"
  exit 0
}
for feature in avx2 fma f16c; do
  grep -qw "$feature" /proc/cpuinfo 2>/dev/null || skip "emulation needs an x86-64 processor with AVX2, FMA and F16C"
done
echo '#include <simde/x86/avx512.h>' | ${CXX:-c++} -x c++ -E - >/dev/null 2>&1 ||
  skip "SIMDe's headers are missing (Debian: apt-get install -y libsimde-dev)"

"$cmake" -S . -B "$build" -DKVASIR_EMULATE=ON -DKVASIR_OUTPUT="$build" >/dev/null
"$cmake" --build "$build" --target kvasir_cpu kvasir_test_kernels -j 2 >"$build/build.log" 2>&1 || { tail -20 "$build/build.log"; exit 1; }

# Wide registers, the upper half of the others, or masks.
objdump -d --no-show-raw-insn "$build/libkvasir_cpu.so" >"$build/instructions.txt"
if grep -m 3 -E '%zmm|%[xy]mm(1[6-9]|2[0-9]|3[01])|%k[0-7]' "$build/instructions.txt"; then
  echo "emulate: the library has instructions of AVX-512"
  exit 1
fi

"$build/kvasir_test_kernels" | tee "$build/kernels.log"
grep -q '^kernels on avx512: passed' "$build/kernels.log"
export KVASIR_LIBRARY=$build/libkvasir_cpu.so OMP_NUM_THREADS=1
"$python" -c 'from kvasir.ops import native; assert "emulated-avx512" in native.cpu_features() and native.isa() == "avx512"'
"$python" -m pytest -q -rs -n 3 --dist worksteal tests/ops tests/sampling/test_native.py \
  tests/program/test_program.py tests/program/test_quantized.py tests/program/test_gated_delta.py --timeout 600
