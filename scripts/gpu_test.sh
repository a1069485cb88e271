#!/usr/bin/env bash
# Runs the tests that need a GPU and records what was tested in kernels/gpu_tested.toml: the hashes of
# all sources that decide a result there, the versions of the libraries below them, the GPU, and each
# test's largest error. A CPU test fails if a hash or a version differs from the record, or if a test is not
# in it. Nothing is written unless all tests pass.
#
#   scripts/gpu_test.sh            builds the tests and runs them
#   scripts/gpu_test.sh BINARY     runs a test binary of the kernels crate that was built elsewhere
#   JOBS=4 scripts/gpu_test.sh     runs 4 groups of tests at a time, instead of one per core, spread over all GPUs that
#                                  CUDA_VISIBLE_DEVICES names, or that there are
#   WORK=DIR scripts/gpu_test.sh   keeps logs and results in DIR; if a run is cut off, a later one of the same
#                                  sources, test binary and GPU runs the tests that have not passed yet
#   TESTS=REGEX scripts/gpu_test.sh
#                                  runs the tests whose names match, and records nothing
#   SANITIZER=memcheck scripts/gpu_test.sh
#                                  runs the tests under a tool of compute-sanitizer (or racecheck, initcheck,
#                                  synccheck): a finding fails its tests, and nothing is recorded
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -gt 0 ]; then
  binary=$(realpath "$1")
else
  binary=$(cargo test -p longwall-kernels --release --locked --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*longwall_kernels[^"]*\)".*/\1/p' | tail -1)
fi
[ -x "$binary" ] || { echo "there is no program $binary: name a test binary of the kernels crate" >&2; exit 1; }
command -v nvidia-smi > /dev/null || { echo "nvidia-smi is missing: run this where an NVIDIA GPU is" >&2; exit 1; }
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | sed -n 1p)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | sed -n 1p)
gpus=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, | tr -d ' ')}

if [ -n "${WORK:-}" ]; then
  mkdir -p "$WORK"
  work=$(realpath "$WORK")
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
echo 'compilation.cache = "local"' > "$work/cubecl.toml"
sanitizer=
if [ -n "${SANITIZER:-}" ]; then
  sanitizer="compute-sanitizer --tool $SANITIZER --error-exitcode 1 --print-limit 3"
  # Each tensor gets an allocation of its own, so that memcheck sees what reads or writes past its end.
  printf '[memory]\npersistent_memory = "enforced"\n' >> "$work/cubecl.toml"
fi
run="$sanitizer $gpu $driver $(sha256sum < "$binary") $(scripts/kernel_sources.sh | sha256sum)"
[ "$run" = "$(cat "$work/run" 2> /dev/null)" ] || rm -rf "$work/passed" "$work/errors" "$work/kernels"
echo "$run" > "$work/run"
export LONGWALL_TEST_ERRORS="$work/errors" binary work sanitizer gpus
touch "$LONGWALL_TEST_ERRORS" "$work/passed"

# A group is a suite of references, or the tests of one operation; any other test is a group of its own. The
# groups of a module run in one folder, where the runtime keeps compiled kernels.
run_group() {
  local all
  IFS=, read -ra all <<< "$gpus"
  export CUDA_VISIBLE_DEVICES=${all[SLOT % ${#all[@]}]}
  module="$work/kernels/$(cut -d: -f1-5 <<< "$1")"
  mkdir -p "$module"
  (cd "$module" && $sanitizer "$binary" --ignored --test-threads=1 "$1") > "$work/$1.log" 2>&1 || {
    grep '^========= .*SUMMARY' "$work/$1.log" | sed "s|^|$1: |"
    [ -z "$sanitizer" ] || return 0
  }
  sed -n 's/^test \(.*\) \.\.\. ok$/\1/p' "$work/$1.log" >> "$work/passed"
  sed -n 's/^test \(.*\) \.\.\. FAILED$/FAILED \1/p' "$work/$1.log"
  grep -A 1 'panicked' "$work/$1.log" | grep -v '^--$' || true
}
export -f run_group
"$binary" --list --ignored 2> /dev/null | sed -n 's/: test$//p' |
  { grep -E "${TESTS:-}" || true; } | sort > "$work/tests"
sort -u -o "$work/passed" "$work/passed" # A run that was cut off left it unsorted.
comm -13 "$work/passed" "$work/tests" |
  sed -E '/^(attention::suites::.*::references|ops)::/s/[^:]*$//' | sort -u > "$work/groups"
# Those of long sequences first, which take longest. Of the others the slowest first, and one of each module
# before the next of any: it leaves its compiled kernels to them.
slowest='::(bf16|path|pruning|power|wall)::'
{
  grep '::references::' "$work/groups" || true
  grep -v '::references::' "$work/groups" | grep -E "$slowest" || true
  grep -vE "::references::|$slowest" "$work/groups" || true
} |
  awk -F: '/::length::/ { print 0, $0; next } { module = $1 FS $3 FS $5; print 1 + before[module]++, $0 }' |
  sort -s -n -k 1,1 | cut -d ' ' -f 2 |
  xargs -P "${JOBS:-$(nproc)}" --process-slot-var=SLOT -I{} bash -c 'run_group {}'
sort -u -o "$work/passed" "$work/passed"
echo "$(wc -l < "$work/passed") of $(wc -l < "$work/tests") tests passed"
[ -s "$work/tests" ] || { echo "no test was found in $binary" >&2; exit 1; }
if ! cmp -s "$work/passed" "$work/tests"; then
  comm -13 "$work/passed" "$work/tests" | sed 's/^/did not pass: /'
  exit 1
fi
[ -z "$sanitizer${TESTS:-}" ] || exit 0

{
  echo "# Written by scripts/gpu_test.sh."
  echo "gpu = \"$gpu\""
  echo "driver = \"$driver\""
  echo "date = \"$(date -u +%F)\""
  echo
  echo "# What decided the results, as scripts/kernel_sources.sh lists it."
  echo "[sources]"
  scripts/kernel_sources.sh | sed 's/\(.*\) \(.*\)/"\1" = "\2"/'
  echo
  echo "# Each test's largest error, relative to the largest value compared; 0 where it compares bits."
  echo "[tests]"
  awk 'NR == FNR { if ($2 + 0 > worst[$1] + 0) worst[$1] = $2 + 0; next }
       { printf "\"%s\" = %.3e\n", $1, worst[$1] }' "$LONGWALL_TEST_ERRORS" "$work/tests"
} > "$work/record"
mv "$work/record" kernels/gpu_tested.toml
echo "wrote kernels/gpu_tested.toml"
