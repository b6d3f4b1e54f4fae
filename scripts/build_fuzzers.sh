#!/usr/bin/env bash
# Builds the fuzzers of the native kernels (csrc/fuzz) into build/fuzz/native, if clang with libFuzzer is installed.
#     scripts/build_fuzzers.sh [cmake]
set -euo pipefail
cd "$(dirname "$0")/.."
cmake=${1:-cmake}
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' >"$probe/probe.cpp"
if ! clang++ -fsanitize=fuzzer,address "$probe/probe.cpp" -o "$probe/probe" 2>/dev/null; then
  echo "clang with libFuzzer not found: the native kernels are not fuzzed (Debian: apt-get install clang libclang-rt-14-dev)"
  exit 0
fi
"$cmake" -S . -B build/fuzz/cmake -DKVASIR_FUZZ=ON -DKVASIR_SANITIZE=ON -DCMAKE_CXX_COMPILER=clang++ \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
"$cmake" --build build/fuzz/cmake --target kvasir_fuzzers -j 2 >build/fuzz/build.log 2>&1 || { tail -20 build/fuzz/build.log; exit 1; }
