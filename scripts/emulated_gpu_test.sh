#!/usr/bin/env bash
# Runs GPU tests of the kernels crate on a machine without a GPU, on the emulator (emulator/README.md). Passing there
# is no record: only scripts/gpu_test.sh, on a GPU, writes kernels/gpu_tested.toml. Tests that are too large for a CPU
# are left out, and one of streams that run at the same time. Needs g++, make and Python 3, on x86-64 with AVX2. Logs
# are in target/emulator/logs.
#
#   scripts/emulated_gpu_test.sh           runs a small selection (DEFAULT below), a few minutes
#   scripts/emulated_gpu_test.sh NAME …    runs the tests whose names start with each NAME, one group after the other:
#                                          attention::suites::fox::cuda::bf16, ops::rms_norm
#   BINARY=FILE scripts/emulated_gpu_test.sh …
#                                          runs a test binary of the kernels crate that was built elsewhere
#   scripts/emulated_gpu_test.sh --check-kernels [FILE.cu …]
#                                          compiles kernels that earlier runs have met by NVIDIA's compiler for an
#                                          H100, and prints registers, stack, spills and warnings. Fetches the
#                                          compiler first (pip). NVRTC_MAXSPILL=0 makes spills an error
set -euo pipefail
cd "$(dirname "$0")/.."

DEFAULT=(
  attention::suites::fox::cuda::bf16::is_causal
  attention::suites::power::cuda::bf16::is_causal
  attention::suites::rela::cuda::bf16::is_causal
  ops::rms_norm
  ops::mlp
)
LEFT_OUT=(full_device at_a_models_size length products_go_on_beside)
work=$(realpath -m "${EMU_BUILD:-target/emulator}")
export EMU_BUILD=$work

need() {
  command -v "$1" > /dev/null || { echo "$1 is missing: $2" >&2; exit 1; }
}
need python3 "it rewrites the kernels' inline PTX; install Python 3"

if [ "${1:-}" = --check-kernels ]; then
  shift
  [ -d "$work/wheels/nvidia" ] || emulator/tools/fetch_compiler.sh
  exec python3 -B emulator/tools/check_kernels.py "$@"
fi

case "${1:-}" in
  -*) sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3- >&2; exit 2 ;;
esac
need g++ "it compiles the emulator and the kernels; install GCC 11 or later"
need make "it builds the emulator; install make"
make --silent -C emulator BUILD="$work"
if [ -n "${BINARY:-}" ]; then
  binary=$(realpath "$BINARY")
else
  binary=$(cargo test -p longwall-kernels --release --locked --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*longwall_kernels[^"]*\)".*/\1/p' | tail -1)
fi
mkdir -p "$work/logs"
ignored=$(emulator/tools/run "$binary" --list --ignored 2> /dev/null | sed -n 's/: test$//p')

# The tests of a group, by full names: a filter of the test binary matches inside a name, too.
tests_of() {
  local pattern
  pattern=$(IFS='|'; echo "${LEFT_OUT[*]}")
  awk -v start="$1" -v out="$pattern" 'index($0, start) == 1 && $0 !~ out' <<< "$ignored"
}

failed=0
[ $# -gt 0 ] || set -- "${DEFAULT[@]}"
for name in "$@"; do
  mapfile -t tests < <(tests_of "$name")
  if [ ${#tests[@]} -eq 0 ]; then
    echo "$name: no GPU test starts with this name, or all are left out" >&2
    failed=1
    continue
  fi
  log=$work/logs/$name.log
  start=$SECONDS
  status=passed
  # The log is also searched: a test may pass although the emulator has found an error.
  if ! emulator/tools/run "$binary" --ignored --exact --nocapture --test-threads=1 "${tests[@]}" > "$log" 2>&1; then
    status="FAILED, see $log"
  fi
  errors=$(grep -c 'EMU ERROR' "$log" || true)
  if [ "$errors" -gt 0 ]; then
    status="FAILED, $errors emulator errors, see $log"
  fi
  [ "$status" = passed ] || failed=1
  echo "$name: $status (${#tests[@]} tests, $((SECONDS - start)) s)"
done
exit "$failed"
