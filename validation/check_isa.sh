#!/usr/bin/env bash
# The native core keeps to its instruction sets, and runs on another processor. Two checks:
#   1. In the objects of an x86-64 build only those of kernels/avx2, kernels/avx512 and kernels/amx name a ymm or zmm register,
#      and these export no weak symbol: an inline function that others share could be the copy that an older processor cannot
#      run. A tile register is named by kernels/amx alone, and not where it emulates them.
#   2. The core compiles for aarch64, and the kernel self-test gives the same bits there under qemu.
# A check whose tools are missing says "skipped" and why. Usage: validation/check_isa.sh [build directory]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=${1:-build/check_isa}
failed=0
skipped=0
[ -x .venv/bin/cmake ] && PATH="$PWD/.venv/bin:$PATH"

skip() {
  echo "skipped: $*"
  skipped=$((skipped + 1))
}
step() { printf '\n== %s\n' "$*"; }
missing() {
  local tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || { echo "$tool not found"; return 0; }
  done
  return 1
}
configure() {
  cmake -S native -B "$1" -DCMAKE_BUILD_TYPE=Release -DCOLIBRI_EXTENSION=OFF -DCOLIBRI_SELFTEST=ON "${@:2}" >"$1.log" 2>&1 ||
    { cat "$1.log"; return 1; }
}
build() { cmake --build "$1" --parallel "${@:2}" >>"$1.log" 2>&1 || { tail -40 "$1.log"; return 1; }; }

# Prints the objects below $1 that break a rule; empty if none does. Wide registers are a fault outside the kernels of
# an instruction set, weak symbols inside, tile registers outside of the AMX library. (grep reads to the end: with -q, pipefail would turn its early exit into "none".)
offenders() {
  local object
  find "$1" -name '*.o' | sort | while read -r object; do
    case $object in
      */kernels/avx2/* | */kernels/avx512/* | */kernels/amx/*)
        if nm "$object" | grep -E ' [VvWwu] ' >/dev/null; then echo "weak symbol: $object"; fi ;;
      *)
        if objdump -d --no-show-raw-insn "$object" | grep -E '%[yz]mm[0-9]' >/dev/null; then echo "wide register: $object"; fi ;;
    esac
    case $object in
      */colibri_amx.dir/*) ;;
      *)
        if objdump -d --no-show-raw-insn "$object" | grep -E '%tmm[0-9]|tilerelease|ldtilecfg' >/dev/null; then
          echo "tile register: $object"
        fi ;;
    esac
  done
}

mkdir -p "$work"

step "x86-64: wide registers and weak symbols"
if [ "$(uname -m)" != x86_64 ]; then
  skip "this machine is $(uname -m)"
elif reason=$(missing cmake objdump nm); then
  skip "$reason"
else
  configure "$work/x86"
  build "$work/x86" --target colibri_core kernel_selftest
  "$work/x86/kernel_selftest" || failed=1
  objects=$(find "$work/x86" -name '*.o' | wc -l)
  found=$(offenders "$work/x86/CMakeFiles")
  # The check must be able to fail: a kernel's own object in a place where it does not belong, one with an inline function, and
  # instructions for tiles where they are emulated.
  planted="$work/planted"
  rm -rf "$planted" && mkdir -p "$planted/routing" "$planted/kernels/avx2" "$planted/colibri_amx_emulated.dir/kernels/amx"
  cp "$(find "$work/x86" -path '*kernels/avx2/floats.cpp.o')" "$planted/routing/a.o"
  printf 'inline int shared(int x) { return x; }\nint (*address)(int) = shared;\n' | "${CXX:-c++}" -x c++ -c - -o "$planted/kernels/avx2/b.o"
  cp "$(find "$work/x86" -path '*colibri_amx.dir/*/products.cpp.o')" "$planted/colibri_amx_emulated.dir/kernels/amx/c.o"
  if [ "$(offenders "$planted" | wc -l)" != 3 ]; then
    echo "FAILED: the check does not see the planted faults"
    failed=1
  fi
  if [ -n "$found" ]; then
    printf 'FAILED:\n%s\n' "$found"
    failed=1
  else
    echo "passed: $objects objects"
  fi
fi

step "aarch64: compile the core, run the kernel self-test under qemu"
if reason=$(missing cmake aarch64-linux-gnu-g++ qemu-aarch64); then
  skip "$reason (Debian: g++-aarch64-linux-gnu, qemu-user)"
else
  configure "$work/aarch64" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
  build "$work/aarch64" --target colibri_core kernel_selftest
  qemu-aarch64 -L /usr/aarch64-linux-gnu "$work/aarch64/kernel_selftest" || failed=1
fi

step "$([ $failed = 0 ] && echo "$((2 - skipped)) of 2 checks ran, nothing failed" || echo FAILED)"
exit $failed
