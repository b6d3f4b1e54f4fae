#!/usr/bin/env bash
# install_kvasir.sh PIP...: installs the checkout, editable, with its native kernels. PIP: the install command with its
# arguments. Without a C++ compiler it installs no kernels, but torch for the eager executor.
set -eu
cd "$(dirname "$0")/.."

has_compiler() {
  for name in ${CXX:-c++ g++ clang++}; do
    if echo 'int main() {}' | "$name" -x c++ - -o /dev/null 2>/dev/null; then return 0; fi
  done
  return 1
}

if has_compiler; then
  echo "Installing Kvasir and building its native kernels ..."
  "$@" --no-build-isolation -e '.[demo]'
else
  echo "No C++ compiler found: installing Kvasir without its native kernels, and torch for the slower eager executor."
  echo "To get the kernels, install g++ or clang++, then run: make clean && make demo"
  "$@" torch
  "$@" --no-build-isolation -C wheel.cmake=false -e '.[demo,torch]'
fi
