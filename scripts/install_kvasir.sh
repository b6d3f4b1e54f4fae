#!/usr/bin/env bash
# install_kvasir.sh PIP...: installs the checkout, editable, with its native kernels, and shows how far their build is.
# PIP: the install command with its arguments. Without a C++ compiler it installs no kernels, but torch for the eager
# executor, and says so at the beginning and at the end.
set -eu -o pipefail
cd "$(dirname "$0")/.."

has_compiler() {
  for name in ${CXX:-c++ g++ clang++}; do
    # A here-string, since a compiler that does not read all of a pipe would fail it.
    if "$name" -x c++ - -o /dev/null 2>/dev/null <<<'int main() {}'; then return 0; fi
  done
  return 1
}

# Shows the counter of the build's steps, which pip prints with -v only: on a terminal in one line, else four times.
progress() {
  local terminal=""
  if [ -t 1 ]; then terminal=1; fi
  awk -v terminal="$terminal" '
    match($0, /\[[0-9]+\/[0-9]+\]/) {
      split(substr($0, RSTART + 1, RLENGTH - 2), step, "/")
      quarter = int(4 * step[1] / step[2])
      if (terminal) printf "\rBuilding native kernels: %d of %d ", step[1], step[2]
      else if (quarter > shown) printf "Building native kernels: %d of %d\n", step[1], step[2]
      shown = quarter; any = 1; fflush()
    }
    END { if (terminal && any) printf "\n" }'
}

without_compiler() {
  echo "No C++ compiler found: $1 Kvasir without its native kernels, and torch for the slower eager executor."
  echo "To get the kernels, install g++ or clang++ (Debian, Ubuntu: apt install g++), then run: make clean && make demo"
}

if ! has_compiler; then
  without_compiler "installing"
  "$@" torch
  "$@" --no-build-isolation --config-settings=wheel.cmake=false -e '.[demo,torch]'
  without_compiler "installed"
  exit
fi

echo "Installing Kvasir and building its native kernels, which takes a few minutes ..."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! "$@" -vv --no-build-isolation -e '.[demo]' 2>&1 | tee "$log" | progress; then
  tail -n 60 "$log" >&2
  echo "Kvasir could not be installed; the lines above say why." >&2
  exit 1
fi
