#!/usr/bin/env bash
# Runs the tests that need a GPU and records what was tested in kernels/gpu_tested.toml: the hash of
# every kernel's source, the GPU, and each test's largest error. A test on the CPU fails when a
# source differs from the record.
#
#   scripts/gpu_test.sh            builds the tests and runs them
#   scripts/gpu_test.sh BINARY     runs the tests of the kernels crate that were built elsewhere
#   JOBS=4 scripts/gpu_test.sh     so many at a time, instead of one for each core
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -gt 0 ]; then
  binary=$(realpath "$1")
else
  binary=$(cargo test -p longwall-kernels --release --locked --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*longwall_kernels[^"]*\)".*/\1/p' | tail -1)
fi
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export LONGWALL_TEST_ERRORS="$work/errors" binary work
touch "$LONGWALL_TEST_ERRORS"

run_one() {
  if "$binary" --ignored --exact "$1" > "$work/$1.log" 2>&1 &&
    grep -q '^test result: ok. 1 passed' "$work/$1.log"; then
    echo "$1" >> "$work/passed"
  else
    echo "FAILED $1"
    grep -E 'panicked|off by|right is|Error' -A 3 "$work/$1.log" | head -20
    echo "$1" >> "$work/failed"
  fi
}
export -f run_one
touch "$work/passed" "$work/failed"
"$binary" --list --ignored 2> /dev/null | sed -n 's/: test$//p' | sort > "$work/tests"
xargs -P "${JOBS:-$(nproc)}" -I{} bash -c 'run_one {}' < "$work/tests"
echo "$(wc -l < "$work/passed") of $(wc -l < "$work/tests") tests passed"
[ ! -s "$work/failed" ] || exit 1
[ -s "$work/passed" ] || { echo "no test was found in $binary" >&2; exit 1; }

{
  echo "# Written by scripts/gpu_test.sh."
  echo "gpu = \"$gpu\""
  echo "driver = \"$driver\""
  echo "date = \"$(date -u +%F)\""
  echo
  echo "# Hashes of the kernels' sources."
  echo "[sources]"
  scripts/kernel_sources.sh | while read -r file; do
    echo "\"$file\" = \"$(sha256sum "$file" | cut -d' ' -f1)\""
  done
  echo
  echo "# Each test's largest error, relative to the largest value compared; 0 where it compares bits."
  echo "[tests]"
  while read -r test; do
    worst=$(grep -F "$test " "$LONGWALL_TEST_ERRORS" | awk -v test="$test" '$1 == test' |
      cut -d' ' -f2 | sort -g | tail -1)
    echo "\"$test\" = ${worst:-0.0}"
  done < "$work/tests"
} > "$work/record"
mv "$work/record" kernels/gpu_tested.toml
echo "wrote kernels/gpu_tested.toml"
