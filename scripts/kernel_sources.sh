#!/usr/bin/env bash
# Lists what decides a result on CUDA, one a line, as NAME VALUE: the sources of the kernels crate with
# the hashes of their code, without lines that are only comments, blank lines and tests; and the
# locked versions of the libraries that generate and launch kernels. scripts/gpu_test.sh records it.
set -euo pipefail
cd "$(dirname "$0")/.."

find kernels/src -name '*.rs' ! -name tests.rs ! -path '*/tests/*' ! -path '*/testing/*' \
  ! -path '*/conformance/*' ! -name support.rs | LC_ALL=C sort | while read -r file; do
  # The code up to the tests at its end.
  code=$(sed '/^mod tests {$/,$d' "$file" | grep -vE '^[[:space:]]*(//|$)')
  echo "$file $(sha256sum <<< "$code" | cut -d' ' -f1)"
done
awk -F'"' '/^name = "(cubecl|cubek|cudarc|burn)/ { name = $2; getline; print name, $2 }' Cargo.lock
