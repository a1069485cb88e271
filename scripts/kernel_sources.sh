#!/usr/bin/env bash
# Lists the sources of kernels for CUDA, which scripts/gpu_test.sh records.
set -euo pipefail
cd "$(dirname "$0")/.."
find kernels/src -name '*.rs' \( -path '*/cuda/*' -o -path '*/tile/*' -o -name 'cuda.rs' -o -name 'kernel.rs' \) | LC_ALL=C sort
