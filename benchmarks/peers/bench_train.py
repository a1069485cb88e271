#!/usr/bin/env python3
"""Times training steps of GPT-2's shape in compiled PyTorch on one GPU, with peers' attention.

  bench_train.py --out DIR [--kinds rope,fox] [--models 124m,350m,1.3b] [--batches 64x1024,16x4096]

Each case is a process. Results go to DIR/train.jsonl as README.md says, logs to DIR/train.log.
"""

import argparse
import os
import sys

from catalogue import TRAIN, TRAIN_BASELINE, chosen
from launch import Results, start, words, words_of
from models import BATCHES, MODELS

# Longer sequences are timed only if they are asked for.
USUAL_LEN = 4096

# The module of each implementation.
MODULES = {name: module for of_kind in TRAIN.values() for name, module in of_kind.items()}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=".", help="folder of the results")
    parser.add_argument("--kinds", type=words, default=list(TRAIN), help="Longwall's kinds")
    parser.add_argument("--attn", type=words_of(MODULES), help=f"instead of --kinds: {', '.join(MODULES)}")
    parser.add_argument("--models", type=words_of(MODELS), default=["124m"], help=", ".join(MODELS))
    of_model = f"of every model; all: those of models.py; by default, those of up to {USUAL_LEN} tokens"
    parser.add_argument("--batches", type=batches, default=usual_batches(), metavar="BxT,...", help=of_model)
    parser.add_argument("--configs", type=int, default=2, help="configurations tried a kernel")
    parser.add_argument("--case-s", type=float, default=120, help="most seconds of one case")
    return parser.parse_args()


def batches(text):
    """Sequences and their length, by model."""
    if text == "all":
        return BATCHES
    try:
        pairs = [tuple(map(int, pair.split("x"))) for pair in words(text)]
        return {model: [(batch, seq_len) for batch, seq_len in pairs] for model in MODELS}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no list as 64x1024,16x4096") from None


def usual_batches():
    """The batches of models.py that are timed by default."""
    return {model: [b for b in of_model if b[1] <= USUAL_LEN] for model, of_model in BATCHES.items()}


def main():
    args = arguments()
    results = Results(args.out, "train")
    if not results.can_run():
        return
    names = args.attn or [name for of_kind in chosen(TRAIN, args.kinds).values() for name in of_kind]
    names = results.present({name: MODULES[name] for name in names})
    rows = [(model, *batch) for model in args.models for batch in args.batches[model]]
    # A block is compiled once for all, and the loss; for comparison, once the whole model.
    cases = [(name, *row, "block") for name in names for row in rows]
    cases += [(name, *row, "whole") for name in names if name == TRAIN_BASELINE for row in rows[:1]]
    for case in cases:
        measure(results, case, args.configs, args.case_s)


def measure(results, case, configs, seconds):
    """Times a case: the implementation, the model, the batch, its sequences' length, what is compiled."""
    about = dict(zip(("attn", "model", "B", "T", "compile"), case))
    # The key of PyTorch's cache of compiled code leaves the choice of attention's backend out:
    # kinds that shared a cache would all run the attention that was traced first.
    options = {"caches": f"-{about['attn']}", "threads": os.cpu_count() or 1}
    worker = start("train_worker.py", dict(about, configs=configs), results.log, **options)
    results.follow(worker, about, seconds)


if __name__ == "__main__":
    sys.exit(main())
