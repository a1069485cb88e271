#!/usr/bin/env bash
# Lists what decides a result on CUDA, one NAME VALUE per line: the sources of the kernels crate with the
# hashes of their code (without comment lines, blank lines and tests), and the locked versions of the
# libraries that generate and launch kernels. scripts/gpu_test.sh records it.
set -euo pipefail
cd "$(dirname "$0")/.."

find kernels/src -name '*.rs' ! -name tests.rs ! -path '*/tests/*' ! -path '*/testing/*' \
  ! -path '*/conformance/*' ! -name support.rs | LC_ALL=C sort | while read -r file; do
  # The code before the test module at the end.
  code=$(sed '/^mod tests {$/,$d' "$file" | grep -vE '^[[:space:]]*(//|$)')
  echo "$file $(sha256sum <<< "$code" | cut -d' ' -f1)"
done
awk -F'"' '/^name = "(cubecl|cubek|cudarc|burn)/ { name = $2; getline; print name, $2 }' Cargo.lock
