#!/usr/bin/env python3
"""Times training steps of GPT-2 124M in compiled PyTorch on one GPU, with peers' attention.

  bench_train.py --out DIR [--kinds rope,fox]

Each case is a process. Results go to DIR/train.jsonl as README.md says, logs to DIR/train.log.
"""

import argparse
import os
import sys

from catalogue import TRAIN, TRAIN_BASELINE, chosen
from launch import Results, start, words

# Sequences and their length.
BATCHES = [(64, 1024), (16, 4096)]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=".", help="folder of the results")
    parser.add_argument("--kinds", type=words, default=list(TRAIN), help="Longwall's kinds")
    parser.add_argument("--configs", type=int, default=2, help="configurations tried a kernel")
    parser.add_argument("--case-s", type=float, default=120, help="most seconds of one case")
    return parser.parse_args()


def main():
    args = arguments()
    results = Results(args.out, "train")
    if not results.can_run():
        return
    modules = {}
    for of_kind in chosen(TRAIN, args.kinds).values():
        modules.update(of_kind)
    # A block is compiled once for all, and the loss; for comparison, once the whole model.
    cases = [(name, *batch, "block") for name in results.present(modules) for batch in BATCHES]
    cases += [(TRAIN_BASELINE, *BATCHES[0], "whole")]
    for case in cases:
        about = dict(zip(("attn", "B", "T", "compile"), case))
        # The key of PyTorch's cache of compiled code leaves the choice of attention's backend out:
        # kinds that shared a cache would all run the attention that was traced first.
        options = {"caches": f"-{about['attn']}", "threads": os.cpu_count() or 1}
        request = dict(about, configs=args.configs)
        worker = start("train_worker.py", request, results.log, **options)
        results.follow(worker, about, args.case_s)


if __name__ == "__main__":
    sys.exit(main())
