#!/usr/bin/env bash
# After an editable install: did the native kernels get built? A missing compiler is fine, a broken build is not.
set -eu
cd "$(dirname "$0")/.."

if compgen -G 'src/kvasir/_lib/libkvasir_cpu.*' >/dev/null; then
  exit 0
fi
if command -v "${CXX:-c++}" >/dev/null && echo 'int main() {}' | "${CXX:-c++}" -x c++ - -o /dev/null 2>/dev/null; then
  echo "The native kernels did not build although a compiler is here. To see why:" >&2
  echo "  cmake -S . -B build/native && cmake --build build/native" >&2
  exit 1
fi
echo "No C++ compiler found: Kvasir will run on the slower eager executor (install g++ or clang++ to get its kernels)."
