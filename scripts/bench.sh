#!/usr/bin/env bash
# Measures attention, decoding and training on this machine's GPU and prints one table; beside them,
# in the same run, implementations of others.
#
#   scripts/bench.sh                      builds Longwall and measures it
#   scripts/bench.sh BINARY               measures a binary that was built elsewhere
#   PEERS=DIR scripts/bench.sh [BINARY]   measures DIR/bench_peers.py and DIR/bench_train.py too
#
# Chosen by environment variables:
#   PARTS   what is measured: kernels, decode, train; by default all three. Empty, the table is made
#           of the results in OUT
#   KINDS   attention kinds; by default those with a kernel for CUDA. rope is measured without its
#           rotation as well, as "softmax", which is what the peers' softmax attention does
#   SHAPES  B,H,T,D of the kernels, separated by spaces; by default five
#   OUT     a folder for the raw results; by default a temporary one, removed at the end
#   PYTHON  the Python that makes the table and runs the peers; by default python3
#
# The peers' scripts are not part of this repository. They write JSON, one object a line, into the
# folder that the environment variable OUT names, and a log if they like (peers.log, train.log). Lines
# that do not start with {, objects without a time or rate and other fields are ignored. A script that
# fails ends with another status than 0; what it wrote counts.
#   bench_peers.py --only NAMES --no-check [--shapes NUMBERS] (kernels and decode)
#     --no-check  results are timed and not compared with each other
#     NAMES       with commas between them: sdpa, those in `workers` below, and decode
#     NUMBERS     with commas between them: the kernels' shapes to measure, as in `numbers` below
#     peers.jsonl
#       {"env": {"gpu": NAME, "torch": VERSION}}
#       {"impl": NAME, "pass": "fwd" or "fwdbwd" (with backward), "shape": [B, H, T, D], "ms": TIME}
#       {"impl": NAME, "pass": "decode", "shape": [B, H, context, D], "ms": TIME, "ms_graph": TIME}
#     where ms_graph, of a step in a CUDA graph, may be null or absent; decoding is that of 8
#     sequences with 16 heads of 128 channels after 4096, 32768 and 131072 tokens; the table knows
#     the impl sdpa_flash and those in KERNELS and DECODE below
#   bench_train.py --only NAMES (train)
#     NAMES    with commas between them: sdpa, and those in `models` below
#     train.jsonl
#       {"attn": NAME, "B": BATCH, "T": SEQ_LEN, "tokens_s": RATE, "peak_gb": GIB}
#     of GPT-2 124M in bf16 with batches of 65,536 tokens, B × T being 64 × 1024 and 16 × 4096; the
#     table knows the attn sdpa and those in TRAIN below
set -euo pipefail

PARTS=${PARTS-kernels decode train}
SHAPES=${SHAPES:-8,12,1024,64 4,16,4096,64 4,16,4096,128 1,16,16384,128 1,16,65536,64}
PYTHON=${PYTHON:-python3}
for part in $PARTS; do
  case $part in
    kernels | decode) script=bench_peers.py ;;
    train) script=bench_train.py ;;
    *) echo "PARTS has $part; allowed: kernels, decode, train" >&2; exit 2 ;;
  esac
  if [ -n "${PEERS:-}" ] && [ ! -f "$PEERS/$script" ]; then
    echo "PEERS is $PEERS, which has no $script; PARTS has $part, which needs it" >&2
    exit 1
  fi
done
command -v "$PYTHON" > /dev/null || { echo "$PYTHON is not installed; set PYTHON" >&2; exit 1; }
if [ -z "${OUT:-}" ]; then
  OUT=$(mktemp -d)
  trap 'rm -rf "$OUT"' EXIT
fi
mkdir -p "$OUT"
OUT=$(realpath "$OUT")
export OUT
longwall=${1:+$(realpath "$1")}
PEERS=${PEERS:+$(realpath "$PEERS")}
cd "$(dirname "$0")/.."

has() { [[ " $PARTS " == *" $1 "* ]]; }

failed=
# Ours: measure FILE ARGUMENTS…, as JSON in OUT/FILE. What fails is missing in the table.
measure() {
  echo "== longwall bench ${*:2}" >&2
  "$longwall" bench "${@:2}" --device cuda --json > "$OUT/$1" || { rm "$OUT/$1"; failed=yes; }
}

if [ -n "$PARTS" ]; then
  if [ -z "$longwall" ]; then
    cargo build --release --locked
    longwall=$PWD/target/release/longwall
  fi
  # From every kind's entry: its name, and whether it has a kernel for CUDA.
  KINDS=${KINDS:-$("$longwall" variants --json | "$PYTHON" -c '
import json, sys
print(*(v["kind"] for v in json.load(sys.stdin) if "cuda" in v["kernels"]))')}
  kinds=${KINDS//,/ }
  rm -f "$OUT"/ours-*.json "$OUT/peers.jsonl" "$OUT/train.jsonl"
fi

shapes=()
for shape in $SHAPES; do shapes+=(--shape "$shape"); done
for part in kernels decode; do
  has $part || continue
  options=()
  if [ $part = kernels ]; then options=("${shapes[@]}"); fi
  for kind in $kinds; do
    gates=()
    # The range of its authors' benchmark, which the peers draw from too.
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

# The peers' own names of what they compare with a kind.
declare -A workers=([rope]=fla_attn [fox]="fot fla_attn" [wall]=wall [path]=path [power]=power
  [tra]=tda [tda]=tda [linear]=gla [rwkv7]=rwkv7)
declare -A models=([fox]="fox_fla fox_fot" [wall]=wall_fla [path]=path_fla [tra]=tra)
# Their shapes are chosen by number.
declare -A numbers=([4,16,4096,64]=0 [4,16,4096,128]=1 [8,12,1024,64]=2 [1,16,16384,128]=3
  [1,16,65536,64]=4)

# Words with commas between them, each once.
joined() { tr ' ' '\n' <<< "$*" | sed '/^$/d' | awk '!seen[$0]++' | paste -sd,; }

if [ -n "$PEERS" ] && [ -n "$PARTS" ]; then
  only=() chosen=()
  if has kernels; then
    for shape in $SHAPES; do chosen+=(${numbers[$shape]:-}); done
    if [ ${#chosen[@]} -gt 0 ]; then
      only+=(sdpa)
      for kind in $kinds; do only+=(${workers[$kind]:-}); done
    fi
  fi
  if has decode; then only+=(decode); fi
  if [ ${#only[@]} -gt 0 ]; then
    options=(--only "$(joined "${only[@]}")" --no-check)
    if [ ${#chosen[@]} -gt 0 ]; then options+=(--shapes "$(joined "${chosen[@]}")"); fi
    echo "== bench_peers.py ${options[*]}" >&2
    "$PYTHON" "$PEERS/bench_peers.py" "${options[@]}" >&2 ||
      { echo "bench_peers.py failed; see $OUT/peers.log" >&2; failed=yes; }
  fi
  if has train; then
    only=(sdpa)
    for kind in $kinds; do only+=(${models[$kind]:-}); done
    echo "== bench_train.py --only $(joined "${only[@]}")" >&2
    "$PYTHON" "$PEERS/bench_train.py" --only "$(joined "${only[@]}")" >&2 ||
      { echo "bench_train.py failed; see $OUT/train.log" >&2; failed=yes; }
  fi
fi

"$PYTHON" - << 'END'
import glob, json, os

out = os.environ["OUT"]


def objects(name):
    """The objects of a file of JSON lines; none where it is missing."""
    path = os.path.join(out, name)
    if not os.path.exists(path):
        return []
    return [json.loads(line) for line in open(path) if line.startswith("{")]


def ours(pattern):
    reports = [json.load(open(path)) for path in sorted(glob.glob(os.path.join(out, pattern)))]
    for report in reports:
        devices.add(f"{report['device']}, {report['precision']}")
    return reports


devices = set()
KERNELS = {
    "softmax": ["sdpa_cudnn", "fla_attn"],
    "rope": ["sdpa_cudnn", "fla_attn"],
    "fox": ["fot_fox", "fot_fox_acp", "fla_fox"],
    "wall": ["fla_wall"],
    "path": ["fla_path"],
    "power": ["power_attn", "power_c256", "power_c1024"],
    "tra": ["tra"],
    "tda": ["tda"],
    "linear": ["fla_gla"],
    "rwkv7": ["fla_rwkv7"],
}
DECODE = {
    "softmax": ["sdpa_cudnn", "fla_decode"],
    "rope": ["sdpa_cudnn", "fla_decode"],
    "fox": ["fot_decode", "fla_decode_fox"],
    "wall": ["wall_decode_c64", "wall_decode_c128"],
    "path": ["path_decode"],
}
TRAIN = {"fox": ["fox_fla", "fox_fot"], "wall": ["wall_fla"], "path": ["path_fla"], "tra": ["tra"]}


def name_of(result):
    without_rotation = any("position" in key and "none" in key for key in result["settings"])
    return "softmax" if result["kind"] == "rope" and without_rotation else result["kind"]


def number(x):
    if x is None:
        return "–"
    return f"{x:.{0 if x >= 100 else 1 if x >= 10 else 2 if x >= 1 else 3}f}"


def pair(times):
    return " / ".join(number(time) for time in times)


def over(a, b):
    ratios = [f"{x / y:.2f}" for x, y in zip(a, b) if x and y]
    return " / ".join(ratios) or "–"


def lines(head, rows):
    if rows:
        print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        for row in rows:
            print("| " + " | ".join(row) + " |")


def others(names, times):
    return ", ".join(f"{name} {pair(times[name])}" for name in names if name in times) or "–"


peers = objects("peers.jsonl")
devices.update(f"{d['env']['gpu']}, torch {d['env']['torch']}" for d in peers if "env" in d)

timed = {}
for d in peers:
    if d.get("pass") in ("fwd", "fwdbwd") and "ms" in d:
        of_shape = timed.setdefault(tuple(d["shape"]), {})
        of_shape.setdefault(d["impl"], [None, None])[d["pass"] == "fwdbwd"] = d["ms"]
rows = []
for report in ours("ours-kernels*.json"):
    for result in report["results"]:
        name, shape = name_of(result), result["shape"]
        times = [p["milliseconds"]["median"] for p in result["passes"]]
        of_shape = timed.get(tuple(shape), {})
        flash = of_shape.get("sdpa_flash", [None, None])
        label = name if result["path"] == "kernel" else f"{name} ({result['path']})"
        row = [label, str(shape), pair(times), pair(flash), over(times, flash)]
        rows.append((name, shape, row + [others(KERNELS.get(name, []), of_shape)]))
order = {name: at for at, name in enumerate(KERNELS)}
rows.sort(key=lambda row: (order.get(row[0], len(order)), row[1][2] * row[1][3], row[1]))
head = ["attention", "[batch, heads, seq_len, head_dim]", "ours, ms: forward / with backward",
        "FlashAttention-2", "ours over it", "others"]
tables = [(head, [row for _, _, row in rows])]

timed = {}
for d in peers:
    if d.get("pass") == "decode" and "ms" in d:
        # In a graph, launches cost nothing.
        best = min(d["ms"], d.get("ms_graph") or d["ms"])
        timed.setdefault(d["shape"][2], {})[d["impl"]] = [best]
rows = []
for report in ours("ours-decode*.json"):
    for result in report["results"]:
        name, context, step = name_of(result), result["context"], result["passes"][0]
        # The peers decode 8 sequences with 16 heads of 128 channels.
        sizes = [result[key] for key in ("batch", "heads", "kv_heads", "head_dim")]
        of_context = timed.get(context, {}) if sizes == [8, 16, 16, 128] else {}
        time, flash = [step["milliseconds"]["median"]], of_context.get("sdpa_flash", [None])
        shape = str([sizes[0], sizes[1], context, sizes[3]])
        rate = f"{step['per_second'] / 1e12:.2f}"
        row = [name, shape, pair(time), rate, pair(flash), over(time, flash)]
        rows.append((order.get(name, len(order)), context,
                     row + [others(DECODE.get(name, []), of_context)]))
rows.sort(key=lambda row: row[:2])
head = ["decoding", "[batch, heads, context, head_dim]", "ours, ms", "TB/s", "FlashAttention-2",
        "ours over it", "others"]
tables.append((head, [row for _, _, row in rows]))

best = {}
for d in objects("train.jsonl"):
    if "tokens_s" in d:
        key = (d["attn"], d["B"], d["T"])
        best[key] = max(best.get(key, (0, 0)), (d["tokens_s"], d["peak_gb"]))
rows = []
for report in ours("ours-train-*.json"):
    seq_len, kind = report["seq_len"], report["attention"]
    kind = "softmax" if kind == "rope" else kind  # Measured with learned positions.
    batch = report["batch_tokens"] // seq_len
    text = lambda rate, gb: f"{rate / 1e3:.0f}k" + (f", {gb:.1f} GiB" if gb else "")
    peer = lambda name: best.get((name, batch, seq_len))
    rate, memory = report["tokens_per_second"]["median"], report["peak_memory_bytes"]
    softmax = peer("sdpa")
    found = [f"{name} {text(*peer(name))}" for name in TRAIN.get(kind, []) if peer(name)]
    row = [kind, f"{batch} × {seq_len}", text(rate, (memory or 0) / 2**30)]
    row += [text(*softmax) if softmax else "–", f"{rate / softmax[0]:.2f}" if softmax else "–"]
    rows.append((order.get(kind, len(order)), seq_len, row + [", ".join(found) or "–"]))
rows.sort(key=lambda row: row[:2])
head = ["training GPT-2 124M", "batch × seq_len", "ours, tokens/s",
        "PyTorch with FlashAttention-2", "ours over it", "others"]
tables.append((head, [row for _, _, row in rows]))

print("; ".join(sorted(devices)))
for head, rows in tables:
    lines(head, rows)
END
if [ -n "$failed" ]; then
  echo "something failed above: its rows are missing" >&2
  exit 1
fi
