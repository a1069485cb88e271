#!/bin/sh
# Fetches NVIDIA's compiler (NVRTC, ptxas and the headers) by pip into target/emulator/wheels. About 250 MB.
set -eu
build=${EMU_BUILD:-$(dirname "$(readlink -f "$0")")/../../target/emulator}
python3 -m pip --version > /dev/null 2>&1 || { echo "python3 has no pip; it fetches the compiler" >&2; exit 1; }
python3 -m pip install --quiet --no-deps --upgrade --target "$build/wheels" \
  nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
