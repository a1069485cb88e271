#!/usr/bin/env python3
"""Times other implementations of attention on one GPU: forward, with backward, and decoding.

  bench_peers.py --out DIR [--parts kernels,decode] [--kinds rope,fox] [--shape B,H,T,D ...]

First, processes side by side run every operation once on short inputs, so that Triton compiles
its kernels into a shared cache. Then a process for each kind measures, and the others wait: nothing
else uses the GPU, and a crash costs one kind's figures. Results go to DIR/peers.jsonl as README.md
says, logs to DIR/peers.log.
"""

import argparse
import math
import os
import sys
import time

from catalogue import DECODE, KERNELS, chosen
from launch import Results, start, words

SHAPES = [
    (8, 12, 1024, 64),
    (4, 16, 4096, 64),
    (4, 16, 4096, 128),
    (1, 16, 16384, 128),
    (1, 16, 65536, 64),
]

# Kernels are tuned at up to this length; longer sequences take what won there.
TUNED_LEN = 4096

# Processes that share a kind's compilation.
SHARDS = 4


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=".", help="folder of the results")
    parser.add_argument("--parts", type=words, default=["kernels", "decode"])
    parser.add_argument("--kinds", type=words, default=list(KERNELS), help="Longwall's kinds")
    parser.add_argument("--shape", type=shape, action="append", metavar="B,H,T,D")
    parser.add_argument("--configs", type=int, default=8, help="configurations tried a kernel")
    parser.add_argument("--compile-s", type=float, default=240, help="most seconds of compilation")
    parser.add_argument("--kind-s", type=float, default=150, help="most seconds of one kind")
    return parser.parse_args()


def shape(text):
    """Batch, heads, seq_len and head_dim."""
    batch, heads, seq_len, head_dim = map(int, text.split(","))
    return batch, heads, seq_len, head_dim


def main():
    args = arguments()
    results = Results(args.out, "peers")
    if results.can_run():
        requests = requests_of(args, results)
        compile_all(requests, args.compile_s, results)
        measure_all(requests, args.kind_s, results)


def requests_of(args, results):
    """What the workers are to measure, by kind."""
    tables = {"kernels": KERNELS, "decode": DECODE}
    by_part = {part: chosen(tables[part], args.kinds) for part in tables if part in args.parts}
    modules = {}
    for of_kinds in by_part.values():
        for of_kind in of_kinds.values():
            modules.update(of_kind)
    present = results.present(modules)
    # The first shape decides what a kernel takes whose autotuner's key leaves seq_len out.
    shapes = sorted(args.shape or SHAPES, key=lambda s: abs(math.log2(s[2] / TUNED_LEN)))
    common = {"shapes": shapes, "tuned_len": TUNED_LEN, "configs": args.configs}
    requests = {}
    for part, of_kinds in by_part.items():
        for kind, names in of_kinds.items():
            if names := [name for name in names if name in present]:
                requests.setdefault(kind, dict(common))[part] = names
    return requests


def compile_all(requests, most_seconds, results):
    """Compiles side by side; what takes too long is compiled when it is measured."""
    started, running = time.time(), []
    waiting = [
        dict(request, shard=[shard, SHARDS])
        for request in requests.values()
        for shard in range(SHARDS)
    ]
    while (waiting or running) and time.time() - started < most_seconds:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(start("peers_worker.py", waiting.pop(0), results.log, heard=False))
        time.sleep(0.2)
        running = [process for process in running if process.poll() is None]
    for process in running:
        process.kill()
    results.write(compile_s=round(time.time() - started, 1), unfinished=len(waiting + running))


def measure_all(requests, most_seconds, results):
    """Measures one kind after another. All import first: nothing runs beside a measurement."""
    workers = {
        kind: start("peers_worker.py", request, results.log) for kind, request in requests.items()
    }
    for process in workers.values():
        process.stdout.readline()  # It is ready, or has ended.
    for kind, process in workers.items():
        try:
            print("go", file=process.stdin, flush=True)
        except BrokenPipeError:
            pass  # It has ended, which `follow` reports.
        results.follow(process, {"kind": kind}, most_seconds)


if __name__ == "__main__":
    sys.exit(main())
