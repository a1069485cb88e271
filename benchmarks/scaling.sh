#!/usr/bin/env bash
# Prints the training rate of configurations on several numbers of GPUs of this machine, as a Markdown table.
#
#   benchmarks/scaling.sh BINARY 1,2 configs/gpu/gpt2_124m.toml configs/gpu/gpt2_350m.toml
#
# Each run does STEPS steps (default 14) on the text of docs/ with the configuration's own batch; the rate is that of
# the median step after the first WARMUP (default 4), which compile kernels. SETS are further overrides, as
# SETS="train.batch_tokens=262144 train.recompute=true". Validation and checkpoints are off. With SHARED=yes all GPUs of
# a run share each row (train.context_parallel). GPUs differ, so one GPU is measured on each that a larger number will
# use, all at the same time; the table has their mean, slowest and fastest. A share of 100 % is as many times the rate
# on the first number of GPUs as there are more of them.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -lt 3 ]; then
  sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3- >&2
  exit 2
fi
longwall=$(realpath "$1")
IFS=, read -ra counts <<< "$2"
shift 2
steps=${STEPS:-14} warmup=${WARMUP:-4}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The rate of the median step, from a run's metrics.
median() {
  grep '"tokens_per_second"' "$1" | sed -E 's/.*"tokens_per_second":([0-9.e+]+).*/\1/' |
    tail -n +$((warmup + 1)) | sort -g | awk '{ rate[NR] = $1 } END { print rate[int((NR + 1) / 2)] }'
}

mfu() {
  grep '"tokens_per_second"' "$1" | tail -1 | sed -nE 's/.*"mfu":([0-9.e-]+).*/\1/p'
}

# Trains as RUN on `count` GPUs. Leaves RUN.done if that succeeds.
measured() {
  "$longwall" train --config "$config" --gpus "$count" "${sets[@]}" "${shared[@]}" \
    --set "run.name=$1" --set "run.out_dir=$work" --set "train.tokens=$((batch * steps))" \
    --set 'data.sources=[{ kind = "text", paths = ["docs"] }]' --set data.validation_fraction=0.2 \
    --set "data.cache_dir=$work/cache-$1" --set train.validate.every=never --set train.checkpoint.every=never \
    --set 'train.schedule={ kind = "constant" }' > "$work/$1.log" 2>&1 && touch "$work/$1.done"
}

# The GPUs that the largest number uses.
most=$(printf '%s\n' "${counts[@]}" | sort -n | tail -1)
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((most - 1)))}"
gpus=("${gpus[@]:0:most}")

sets=()
for set in ${SETS:-}; do sets+=(--set "$set"); done
echo "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1), median of $((steps - warmup)) steps" >&2
echo "| configuration | GPUs | tokens/s | share of ideal | MFU |"
echo "|---|---|---|---|---|"
for config in "$@"; do
  name=$(basename "$config" .toml)
  batch=$("$longwall" info --config "$config" --json "${sets[@]}" 2> /dev/null |
    tr -d ' \n' | sed -nE 's/.*"batch_tokens":([0-9]+).*/\1/p')
  batch=${batch:-524288}
  base=
  for count in "${counts[@]}"; do
    shared=()
    if [ "${SHARED:-}" = yes ]; then shared=(--set "train.context_parallel=$count"); fi
    runs=()
    if [ "$count" = 1 ]; then
      for gpu in "${gpus[@]}"; do
        CUDA_VISIBLE_DEVICES=$gpu measured "$name-gpu$gpu" &
        runs+=("$name-gpu$gpu")
      done
      wait
    else
      runs=("$name-$count")
      measured "${runs[0]}" || true
    fi
    rates=()
    for run in "${runs[@]}"; do
      # A run that failed has not left it.
      [ -e "$work/$run.done" ] || { tail -20 "$work/$run.log" >&2; exit 1; }
      rates+=("$(median "$work/$run/metrics.jsonl")")
    done
    row=$(printf '%s\n' "${rates[@]}" | sort -g | awk -v name="$name" -v count="$count" -v base="$base" \
      -v mfu="$(mfu "$work/${runs[0]}/metrics.jsonl")" '
        { sum += $1; if (NR == 1) slowest = $1; fastest = $1 }
        END {
          rate = sum / NR
          if (base == "") base = rate / count
          spread = NR > 1 ? sprintf(" (%.0f to %.0f)", slowest, fastest) : ""
          printf "%s | %s | %d | %.0f%s | %.1f %% | %s |\n", base, name, count, rate, spread,
            100 * rate / (base * count), mfu == "" ? "" : sprintf("%.1f %%", 100 * mfu)
        }')
    base=${row%% *}
    echo "${row#* }"
    for run in "${runs[@]}"; do rm -rf "${work:?}/$run" "$work/$run.done"; done
  done
done
