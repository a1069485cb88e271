#!/usr/bin/env bash
# Measures attention, decoding and training on this machine's GPU, and other implementations in the
# same run (benchmarks/peers), and prints tables that compare them. Below the tables it lists what
# could not be measured because PyTorch or another package is missing.
#
#   scripts/bench.sh           builds Longwall and measures it
#   scripts/bench.sh BINARY    measures a binary that was built elsewhere
#
# Environment variables:
#   PARTS   what to measure: kernels, decode, train; by default all three. If empty, only prints the
#           tables of the results in OUT
#   KINDS   attention kinds; by default those with a CUDA kernel. rope is also measured without its
#           rotation, as "softmax", to match the peers' softmax attention
#   SHAPES  B,H,T,D of the kernels, separated by spaces; by default five
#   PEERS   none: measure Longwall only
#   OUT     a folder for the raw results; by default a temporary one, removed at the end
#   PYTHON  the Python that makes the tables and runs the peers; by default python3
set -euo pipefail

PARTS=${PARTS-kernels decode train}
SHAPES=${SHAPES:-8,12,1024,64 4,16,4096,64 4,16,4096,128 1,16,16384,128 1,16,65536,64}
PYTHON=${PYTHON:-python3}
for part in $PARTS; do
  case $part in
    kernels | decode | train) ;;
    *) echo "PARTS has $part; allowed: kernels, decode, train" >&2; exit 2 ;;
  esac
done
case ${PEERS:-} in
  '' | none) ;;
  *) echo "PEERS is $PEERS; allowed: none, or nothing" >&2; exit 2 ;;
esac
command -v "$PYTHON" > /dev/null || { echo "$PYTHON is not installed; set PYTHON" >&2; exit 1; }
if [ -z "${OUT:-}" ]; then
  OUT=$(mktemp -d)
  trap 'rm -rf "$OUT"' EXIT
fi
mkdir -p "$OUT"
OUT=$(realpath "$OUT")
longwall=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."

has() { [[ " $PARTS " == *" $1 "* ]]; }

# measure FILE ARGUMENTS…: `longwall bench ARGUMENTS…`, as JSON in OUT/FILE.
measure() {
  echo "== longwall bench ${*:2}" >&2
  "$longwall" bench "${@:2}" --device cuda --json > "$OUT/$1" ||
    { rm "$OUT/$1"; echo "longwall bench ${*:2}" >> "$OUT/failed.txt"; }
}

# peers SCRIPT ARGUMENTS…: runs a script of benchmarks/peers.
peers() {
  [ "${PEERS:-}" != none ] || return 0
  echo "== $*" >&2
  "$PYTHON" "benchmarks/peers/$1" --out "$OUT" --kinds "$kinds" "${@:2}" >&2 ||
    echo "$*" >> "$OUT/failed.txt"
}

if [ -n "$PARTS" ]; then
  if [ -z "$longwall" ]; then
    cargo build --release --locked
    longwall=$PWD/target/release/longwall
  fi
  KINDS=${KINDS:-$("$longwall" variants --json | "$PYTHON" -c '
import json, sys
print(*(kind["kind"] for kind in json.load(sys.stdin) if "cuda" in kind["kernels"]))')}
  kinds=${KINDS//,/ }
  rm -f "$OUT"/ours-*.json "$OUT"/{peers,train}.{jsonl,log} "$OUT/failed.txt"
fi

shapes=()
for shape in $SHAPES; do shapes+=(--shape "$shape"); done
for part in kernels decode; do
  has $part || continue
  options=()
  if [ $part = kernels ]; then options=("${shapes[@]}"); fi
  for kind in $kinds; do
    gates=()
    # The range that the FoX authors' benchmark uses, and the peers too.
    if [ "$kind" = fox ]; then gates=(--projections 0,10); fi
    if [ "$kind" = rope ]; then
      measure "ours-$part-softmax.json" $part --kind rope --set 'position="none"' "${options[@]}"
    fi
    measure "ours-$part-$kind.json" $part --kind "$kind" "${gates[@]}" "${options[@]}"
  done
done

if has train; then
  for kind in $kinds; do
    attention=(--set "model.attention={ kind = \"$kind\" }")
    if [ "$kind" = rope ]; then # Learned positions, as the peers' softmax model has.
      attention=(--set 'model.positions="learned"' --set 'model.attention.position="none"')
    fi
    for rows in "64 1024" "16 4096"; do
      read -r batch seq_len <<< "$rows"
      measure "ours-train-$kind-$seq_len.json" train --config configs/gpu/gpt2_124m.toml \
        --steps 30 "${attention[@]}" --set train.batch_tokens=65536 \
        --set "train.micro_batch=$batch" --set "data.seq_len=$seq_len"
    done
  done
fi

if has kernels || has decode; then peers bench_peers.py --parts "${PARTS/train/}" "${shapes[@]}"; fi
if has train; then peers bench_train.py; fi

"$PYTHON" benchmarks/tables.py "$OUT"
if [ -s "$OUT/failed.txt" ]; then exit 1; fi
