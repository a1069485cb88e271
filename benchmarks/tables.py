#!/usr/bin/env python3
"""Makes tables, in Markdown, of what scripts/bench.sh has measured into a folder.

  tables.py FOLDER

The folder holds reports of `longwall bench … --json` as ours-PART-NAME.json, the peers' results as
peers.jsonl and train.jsonl (peers/README.md describes their lines), and failed.txt, the commands
that failed. Missing results have no row; what was tried and could not be measured is listed at the end.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from catalogue import (  # noqa: E402
    BASELINE,
    DECODE,
    KERNELS,
    PACKAGES,
    TRAIN,
    TRAIN_BASELINE,
    peers_of,
)

# Kinds come in this order, others after them.
ORDER = ["softmax", "rope", *KERNELS]


def main(folder):
    folder = Path(folder)
    kernels, decode, train = (
        [json.loads(path.read_text()) for path in sorted(folder.glob(f"ours-{part}-*.json"))]
        for part in ("kernels", "decode", "train")
    )
    peers, trained = records(folder / "peers.jsonl"), records(folder / "train.jsonl")
    print("; ".join(sorted(devices(kernels + decode + train, peers + trained))))
    kernel_table(kernels, peers)
    decode_table(decode, peers)
    train_table(train, trained)
    missing_list(folder / "failed.txt", peers + trained)


def records(path):
    """The objects of a file of JSON lines; none where it is missing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def devices(reports, results):
    """What was measured on, in words."""
    ours = {f"{report['device']}, {report['precision']}" for report in reports}
    environments = [result["env"] for result in results if "env" in result]
    return ours | {f"{env['gpu']}, torch {env['torch']}" for env in environments}


def kernel_table(reports, peers):
    """Forward, and forward with backward, of each kind at each shape."""
    timed = {}  # by shape and name
    for peer in peers:
        if peer.get("pass") in ("fwd", "fwdbwd") and "ms" in peer:
            both = timed.setdefault((*peer["shape"], peer["impl"]), [None, None])
            both[peer["pass"] == "fwdbwd"] = peer["ms"]
    rows = []
    for result in (result for report in reports for result in report["results"]):
        name, shape = name_of(result), result["shape"]
        ours = [timing["milliseconds"]["median"] for timing in result["passes"]]
        flash = timed.get((*shape, BASELINE), [None, None])
        label = name if result["path"] == "kernel" else f"{name} ({result['path']})"
        others = {peer: timed.get((*shape, peer)) for peer in peers_of(name, KERNELS)}
        row = [label, str(shape), pair(ours), pair(flash), ratio(ours, flash), listed(others)]
        rows.append(((rank(name), shape[2] * shape[3], shape), row))
    head = ["attention", "[batch, heads, seq_len, head_dim]"]
    head += ["ours, ms: forward / with backward", "FlashAttention-2", "ours over it", "others"]
    print_table(head, rows)


def decode_table(reports, peers):
    """One token after each context."""
    timed = {}  # by shape and name
    for peer in peers:
        if peer.get("pass") == "decode" and "ms" in peer:
            # In a graph, launches cost nothing.
            best = min(peer["ms"], peer.get("ms_graph") or peer["ms"])
            timed[(*peer["shape"], peer["impl"])] = [best]
    rows = []
    for result in (result for report in reports for result in report["results"]):
        name, step = name_of(result), result["passes"][0]
        shape = [result[size] for size in ("batch", "heads", "context", "head_dim")]
        grouped = result["kv_heads"] != result["heads"]  # No peer is measured so.
        known = {} if grouped else timed
        ours = [step["milliseconds"]["median"]]
        flash = known.get((*shape, BASELINE), [None])
        others = {peer: known.get((*shape, peer)) for peer in peers_of(name, DECODE)}
        rate = f"{step['per_second'] / 1e12:.2f}"
        row = [name, str(shape), pair(ours), rate, pair(flash), ratio(ours, flash), listed(others)]
        rows.append(((rank(name), shape[2]), row))
    head = ["decoding", "[batch, heads, context, head_dim]", "ours, ms", "TB/s"]
    print_table([*head, "FlashAttention-2", "ours over it", "others"], rows)


def train_table(reports, peers):
    """Training steps of GPT-2 124M; the peers' results of other sizes have no row."""
    best = {}  # of the ways to compile, by name, batch and length
    for peer in peers:
        if "tokens_s" in peer and peer.get("model", "124m") == "124m":
            key = (peer["attn"], peer["B"], peer["T"])
            best[key] = max(best.get(key, (0, 0)), (peer["tokens_s"], peer["peak_gb"]))
    rows = []
    for report in reports:
        seq_len, kind = report["seq_len"], report["attention"]
        kind = "softmax" if kind == "rope" else kind  # Measured with learned positions.
        batch = report["batch_tokens"] // seq_len
        rate, memory = report["tokens_per_second"]["median"], report["peak_memory_bytes"] or 0
        flash = best.get((TRAIN_BASELINE, batch, seq_len))
        others = [(peer, best.get((peer, batch, seq_len))) for peer in peers_of(kind, TRAIN)]
        others = [f"{peer} {speed(*x)}" for peer, x in others if x and peer != TRAIN_BASELINE]
        row = [kind, f"{batch} × {seq_len}", speed(rate, memory / 2**30)]
        row += [speed(*flash) if flash else "–", f"{rate / flash[0]:.2f}" if flash else "–"]
        rows.append(((rank(kind), seq_len), [*row, ", ".join(others) or "–"]))
    head = ["training GPT-2 124M", "batch × seq_len", "ours, tokens/s"]
    print_table([*head, "PyTorch with FlashAttention-2", "ours over it", "others"], rows)


def missing_list(failed, results):
    """What was tried and not measured, and why."""
    commands = failed.read_text().splitlines() if failed.exists() else []
    lines = [f"`{command}` failed" for command in commands]
    for result in results:
        if "missing" in result:
            module = result["missing"]
            package = PACKAGES.get(module, module)
            lines.append(f"{', '.join(result['names'])}: missing {package}")
        elif "error" in result:
            about = [str(result[key]) for key in ABOUT if key in result]
            lines.append(f"{' '.join(about)}: {result['error']}")
        elif result.get("unfinished"):
            lines.append("peers were still being compiled when measuring began; see peers.log")
    if lines:
        print("\nNot measured (benchmarks/peers/README.md says what the peers need):")
        for line in dict.fromkeys(lines):
            print(f"- {line}")


# What an error is about.
ABOUT = ["kind", "impl", "attn", "model", "shape", "B", "T", "pass", "compile"]


def name_of(result):
    """The kind; "softmax" is rope without its rotation."""
    without_rotation = any("position" in key and "none" in key for key in result["settings"])
    return "softmax" if result["kind"] == "rope" and without_rotation else result["kind"]


def rank(name):
    """A kind's place in the tables."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def number(x):
    """Three digits."""
    if x is None:
        return "–"
    return f"{x:.{0 if x >= 100 else 1 if x >= 10 else 2 if x >= 1 else 3}f}"


def pair(times):
    return " / ".join(number(time) for time in times)


def ratio(ours, theirs):
    ratios = [f"{x / y:.2f}" for x, y in zip(ours, theirs) if x and y]
    return " / ".join(ratios) or "–"


def listed(others):
    """Names with their times, the baseline and what was not measured left out."""
    found = [f"{name} {pair(x)}" for name, x in others.items() if x and name != BASELINE]
    return ", ".join(found) or "–"


def speed(rate, gib):
    return f"{rate / 1e3:.0f}k" + (f", {gib:.1f} GiB" if gib else "")


def print_table(head, rows):
    """Rows in the order of their keys; nothing where there is none."""
    if rows:
        print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        for _, row in sorted(rows, key=lambda row: row[0]):
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: tables.py FOLDER")
    main(sys.argv[1])
