#!/usr/bin/env bash
# Tests training on two GPUs of this machine: losses against one GPU, bits of two equal runs, rows that GPUs share, a
# rank that is killed, one that is stopped, Ctrl-C, and resumes on another number of GPUs. Writes
# crates/train/gpus_tested.toml if all pass.
#
#   scripts/gpus_test.sh            builds the binary and runs it
#   scripts/gpus_test.sh BINARY     runs a binary that was built elsewhere
#   GPUS=4 scripts/gpus_test.sh     on 4 GPUs; their number must divide 64, and up to 4 of them share rows
#   WORK=DIR scripts/gpus_test.sh   keeps runs and logs in DIR
#
# Needs NCCL 2 and the files of this repository. Takes a few minutes, the most for compiling kernels.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -gt 0 ]; then
  longwall=$(realpath "$1")
else
  cargo build -p longwall --release --locked
  longwall=$PWD/target/release/longwall
fi
gpus=${GPUS:-2}
there=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
if [ "$there" -lt "$gpus" ]; then
  echo "this machine has $there GPUs; $gpus are needed" >&2
  exit 1
fi
if [ -n "${WORK:-}" ]; then
  mkdir -p "$WORK"
  work=$(realpath "$WORK")
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi

# 60 steps of 64 rows; the text is this repository's documentation.
config() { # optimiser
  cat << CONFIG
run = { device = "cuda", out_dir = "$work/runs" }
tokenizer = { kind = "bytes" }
[data]
seq_len = 256
validation_fraction = 0.1
validation_tokens = 16384
cache_dir = "$work/cache"
sources = [{ kind = "text", paths = ["docs"] }]
[model]
layers = 4
width = 256
heads = 4
attention = { kind = "fox" }
[train]
tokens = 983040
batch_tokens = 16384
micro_batch = 16
lr = 5e-4
ema = 0.9
[train.optimiser]
kind = "$1"
[train.schedule]
kind = "constant"
[train.validate]
every = 20
[train.checkpoint]
every = 10
[train.norms]
every = 20
CONFIG
}
for optimiser in adamw muon; do config $optimiser > "$work/$optimiser.toml"; done

fail() { echo "FAILED: $*" >&2; exit 1; }
say() { echo "== $* (after $SECONDS s)"; }

# Trains a new run: NAME CONFIG GPUS [ARGUMENT…]
train() {
  local name=$1 config=$2 count=$3
  shift 3
  "$longwall" train --config "$work/$config.toml" --gpus "$count" --set "run.name=$name" "$@" \
    > "$work/$name.log" 2>&1 || { tail -30 "$work/$name.log"; fail "the run $name"; }
}

# Step, loss and gradient norm of each step of a run, as they are written.
steps() {
  grep '"grad_norm"' "$work/runs/$1/metrics.jsonl" | grep '"tokens_per_second"' |
    sed -E 's/.*"step":([0-9]+),.*"loss":([^,]+),"grad_norm":([^,]+),.*/\1 \2 \3/'
}

# Relative differences of two runs, which must have the same steps: of the first loss and gradient norm, the largest of
# the first 10 norms, of the first 20 losses, of the first 40, and of all.
difference() {
  paste -d ' ' <(steps "$1") <(steps "$2") | awk '
    function apart(x, y) { return x > y ? (x - y) / x : (y - x) / x }
    NF != 6 || $1 != $4 { print "different steps: " $0; exit 1 }
    { d = apart($2, $5); if (d > worst) worst = d; if (NR <= 20) early = worst; if (NR <= 40) middle = worst }
    { d = apart($3, $6); if (NR <= 10 && d > norms) norms = d }
    NR == 1 { first = worst; norm = norms }
    END {
      if (NR < 60) { print NR " steps"; exit 1 }
      printf "%.2e %.2e %.2e %.2e %.2e %.2e\n", first, norm, norms, early, middle, worst
    }'
}

# Fails unless two runs agree but for rounding, whose effect grows with the steps: two runs on one GPU with micro-batches
# of 16 and 8 rows differed by 2e-5 in the first 10 losses and by 2e-2 in 60. Sets `worst`.
agree() {
  local result first norm norms early middle
  result=$(difference "$1" "$2") || fail "$1 and $2: $result"
  read -r first norm norms early middle worst <<< "$result"
  echo "$1 and $2 differ: first loss $first, gradient norm $norm, 10 norms $norms; 20 losses $early, 40 $middle, all $worst"
  awk -v first="$first" -v norm="$norm" -v norms="$norms" -v early="$early" -v middle="$middle" -v worst="$worst" \
    'BEGIN {
      ok = first < 1e-5 && norm < 1e-4 && norms < 2e-2 && early < 2e-3 && middle < 2e-2 && worst < 0.1
      exit !ok
    }' || {
      paste -d ' ' <(steps "$1") <(steps "$2") >&2
      fail "$1 and $2 are too far apart"
    }
}

finished() { steps "$1" 2> /dev/null | tail -1 | cut -d ' ' -f 1; }

wait_for_step() { # RUN STEP PID
  for _ in $(seq 6000); do
    [ "$(finished "$1" || true)" -ge "$2" ] 2> /dev/null && return 0
    kill -0 "$3" 2> /dev/null || fail "the run $1 ended: $(tail -5 "$work/$1.log")"
    sleep 0.05
  done
  fail "the run $1 did not reach step $2 within 300 s"
}

# The process of a rank that a process has started: PARENT RANK
process_of() {
  for status in /proc/[0-9]*/status; do
    local pid=${status#/proc/}
    pid=${pid%/status}
    if grep -q "^PPid:[[:space:]]*$1\$" "$status" 2> /dev/null &&
      tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | grep -qx "RANK=$2"; then
      echo "$pid"
      return 0
    fi
  done
  fail "rank $2 of process $1 was not found"
}

# Starts a long run in the background and sends a signal to a rank: NAME SIGNAL RANK [ARGUMENT…]. Sets `seconds`.
signalled() {
  "$longwall" train --config "$work/adamw.toml" --gpus "$gpus" --set "run.name=$1" \
    --set train.tokens=1000000000 "${@:4}" > "$work/$1.log" 2>&1 &
  local parent=$!
  wait_for_step "$1" 25 $parent
  local pid
  pid=$(process_of $parent "$3")
  local start=$SECONDS code=0
  kill -s "$2" "$pid"
  wait $parent || code=$?
  seconds=$((SECONDS - start))
  [ $code -ne 0 ] || fail "$1: exit code 0 after a rank ended"
  [ $seconds -le 30 ] || fail "$1: the run took $seconds s to end"
  kill -0 "$pid" 2> /dev/null && fail "$1: rank $3 is still there"
  grep -q "rank $3 (process $pid on this machine)" "$work/$1.log" ||
    fail "$1: rank $3 is not named: $(tail -8 "$work/$1.log")"
  grep -q 'the last finished step is [0-9]' "$work/$1.log" || fail "$1: no last step"
  grep -q 'is whole; continue from it' "$work/$1.log" || fail "$1: no whole checkpoint is named"
  "$longwall" verify "$work/runs/$1" > "$work/$1-verify.log" 2>&1 || fail "$1: $(cat "$work/$1-verify.log")"
}

say "1 GPU and $gpus GPUs"
declare -A losses
for optimiser in adamw muon; do
  train "$optimiser-1" $optimiser 1
  train "$optimiser-$gpus-a" $optimiser "$gpus"
  train "$optimiser-$gpus-b" $optimiser "$gpus"
  diff <(steps "$optimiser-$gpus-a") <(steps "$optimiser-$gpus-b") > "$work/bits.diff" ||
    fail "two runs of $optimiser on $gpus GPUs differ: $(head -3 "$work/bits.diff")"
  cmp "$work/runs/$optimiser-$gpus-"{a,b}/checkpoints/step-60/weights.safetensors ||
    fail "the weights of two runs of $optimiser on $gpus GPUs differ"
  cmp "$work/runs/$optimiser-$gpus-"{a,b}/checkpoints/step-60/optimizer.safetensors ||
    fail "the optimiser's state of two runs of $optimiser on $gpus GPUs differs"
  # A step that measures the noise scale sums all gradients after its backward pass, not beside it.
  train "$optimiser-$gpus-late" $optimiser "$gpus" --set 'train.noise_scale.every="1 steps"'
  diff <(steps "$optimiser-$gpus-late") <(steps "$optimiser-$gpus-a") > "$work/bits.diff" ||
    fail "sums of $optimiser beside the backward pass and after it differ: $(head -3 "$work/bits.diff")"
  agree "$optimiser-1" "$optimiser-$gpus-a"
  losses[$optimiser]=$worst
done
sharing=$((gpus < 4 ? gpus : 4))
say "$sharing GPUs share each row"
shared=(--set "train.context_parallel=$sharing" --set model.short_conv=true --set model.token_shift=true)
train shared-1 adamw 1 "${shared[@]}" --set train.context_parallel=1
for take in a b; do train "shared-$gpus-$take" adamw "$gpus" "${shared[@]}"; done
diff <(steps "shared-$gpus-a") <(steps "shared-$gpus-b") > "$work/bits.diff" ||
  fail "two runs that share rows differ: $(head -3 "$work/bits.diff")"
cmp "$work/runs/shared-$gpus-"{a,b}/checkpoints/step-60/weights.safetensors ||
  fail "the weights of two runs that share rows differ"
agree shared-1 "shared-$gpus-a"
losses[shared]=$worst
if [ "$gpus" -gt 2 ]; then # In groups of two.
  train shared-2 adamw "$gpus" "${shared[@]}" --set train.context_parallel=2
  agree shared-1 shared-2
fi
train shared-recompute adamw "$gpus" "${shared[@]}" --set train.recompute=true
diff <(steps shared-recompute) <(steps "shared-$gpus-a") > "$work/bits.diff" ||
  fail "recompute changes a run that shares rows: $(head -3 "$work/bits.diff")"

nccl=$(sed -n 's/.*NCCL \([0-9.]*\) (.*/\1/p' "$work/adamw-$gpus-a.log" | head -1)
[ -n "$nccl" ] || fail "NCCL's version was not logged"

say "a rank is killed"
signalled killed KILL 1
killed=$seconds
echo "ended within $killed s"
say "a rank that shares rows is killed"
signalled killed-shared KILL 1 "${shared[@]}"
echo "ended within $seconds s"
say "rank 0 is killed"
signalled killed-0 KILL 0
echo "ended within $seconds s"
say "a rank is stopped, as one that hangs"
signalled stopped STOP 1
stopped=$seconds
echo "ended within $stopped s"

say "Ctrl-C on $gpus GPUs, resumed on 1, Ctrl-C, resumed on $gpus"
interrupted() { # ARGUMENT…
  "$longwall" train "$@" >> "$work/moved.log" 2>&1 &
  local parent=$! code=0
  wait_for_step moved "$until" $parent
  kill -INT $parent
  wait $parent || code=$?
  [ $code -eq 130 ] || fail "exit code $code after Ctrl-C: $(tail -5 "$work/moved.log")"
  local step
  step=$(finished moved)
  [ -f "$work/runs/moved/checkpoints/step-$step/state.json" ] || fail "no checkpoint of step $step after Ctrl-C"
  echo "stopped at step $step"
}
# Slow enough for a signal in time.
slow=(--set train.validate.every=1 --set train.sample.every=1)
until=15 interrupted --config "$work/muon.toml" --gpus "$gpus" --set run.name=moved "${slow[@]}"
until=30 interrupted --resume "$work/runs/moved" --gpus 1
"$longwall" train --resume "$work/runs/moved" --gpus "$gpus" >> "$work/moved.log" 2>&1 ||
  fail "the resume: $(tail -5 "$work/moved.log")"
agree muon-1 moved
losses[moved]=$worst

say "an evaluation on 1 GPU and on $gpus"
for count in 1 "$gpus"; do
  "$longwall" eval passkey --run "$work/runs/moved" --lengths 300,400 --trials 40 --batch 8 --gpus "$count" \
    --out "on-$count" > "$work/eval-$count.log" 2>&1 || fail "the evaluation: $(tail -5 "$work/eval-$count.log")"
done
for file in samples.jsonl results.json; do
  cmp "$work/runs/moved/eval/on-1/$file" "$work/runs/moved/eval/on-$gpus/$file" || fail "$file differs on $gpus GPUs"
done

say "what cannot work is refused"
refused() { # TEXT COMMAND…
  local text=$1
  shift
  "$@" > "$work/refused.log" 2>&1 && fail "$* was not refused"
  grep -q "$text" "$work/refused.log" || fail "not \"$text\" but: $(tail -3 "$work/refused.log")"
}
rank() { # RANK ARGUMENT…
  local rank=$1
  shift
  RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29571 \
    "$longwall" train --config "$work/adamw.toml" --set run.name=refused "$@"
}
refused 'NCCL cannot be loaded; looked for /no/such' \
  env LONGWALL_NCCL=/no/such/libnccl.so.2 "$longwall" train --config "$work/adamw.toml" --gpus 2
refused "allowed: 1 to $there" "$longwall" train --config "$work/adamw.toml" --gpus $((there + 1))
refused 'do not divide by' "$longwall" train --config "$work/adamw.toml" --gpus "$gpus" \
  --set train.batch_tokens=$((256 * (gpus + 1))) --set train.micro_batch=1
rank 1 --set train.lr=0.5 > "$work/rank1.log" 2>&1 &
refused 'has train.lr 0.5, but rank 0 has' rank 0
wait $! && fail "rank 1 was not refused"

{
  echo "# Written by scripts/gpus_test.sh: all its checks passed."
  echo "gpus = \"$gpus × $(nvidia-smi --query-gpu=name --format=csv,noheader | sed -n 1p)\""
  echo "driver = \"$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | sed -n 1p)\""
  echo "nccl = \"$nccl\""
  echo "date = \"$(date -u +%F)\""
  echo
  echo "# The largest relative difference of a step's loss on 1 GPU and on $gpus, in 60 steps in bf16."
  echo "[losses]"
  for optimiser in adamw muon; do echo "$optimiser = ${losses[$optimiser]}"; done
  echo "moved = ${losses[moved]} # Muon, resumed on 1 GPU and back"
  echo "shared = ${losses[shared]} # AdamW, convolutions and token shifts; $sharing GPUs share each row"
  echo
  echo "# Seconds until a run had ended after one of its ranks."
  echo "[seconds]"
  echo "killed = $killed"
  echo "stopped = $stopped"
} > crates/train/gpus_tested.toml
say "all passed; wrote crates/train/gpus_tested.toml"
