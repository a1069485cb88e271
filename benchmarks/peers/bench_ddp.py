#!/usr/bin/env python3
"""Times data-parallel training of GPT-2's shape in compiled PyTorch on several numbers of GPUs, as a Markdown table
like that of benchmarks/scaling.sh.

  bench_ddp.py --gpus 1,2 [--models 124m,350m,1.3b]
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from launch import MARK, words, words_of
from models import BATCHES, MODELS


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=words, default=["1", "2"], help="numbers of GPUs")
    parser.add_argument("--models", type=words_of(MODELS), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--attn", default="cudnn", help="cudnn or sdpa (FlashAttention-2)")
    parser.add_argument("--batch-tokens", type=int, default=524288, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=8, help="steps measured")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    return parser.parse_args()


def measure(args, model, gpus):
    """The record of one case, or None with the end of its errors on stderr."""
    micro_batch, seq_len = BATCHES[model][0]
    sizes = dict(MODELS[model], seq_len=seq_len)
    rows = args.batch_tokens // seq_len
    if rows % (gpus * micro_batch):
        sys.exit(f"{rows} rows are no multiple of {gpus} GPUs · {micro_batch}: change --batch-tokens")
    request = {"attn": args.attn, "sizes": sizes, "micro_batch": micro_batch, "rows": rows}
    request.update(steps=args.steps, warmup=args.warmup)
    worker = Path(__file__).parent / "ddp_worker.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    environment = dict(os.environ, OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // gpus)))
    ended = subprocess.run(
        [*launcher, str(worker), json.dumps(request)], capture_output=True, text=True, env=environment
    )
    for line in ended.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    print(ended.stderr[-3000:], file=sys.stderr)
    return None


def main():
    args = arguments()
    print("| model | GPUs | tokens/s | share of ideal | peak memory |\n|---|---|---|---|---|")
    for model in args.models:
        base = None
        for gpus in map(int, args.gpus):
            record = measure(args, model, gpus)
            if record is None:
                print(f"| {model} | {gpus} | failed | | |", flush=True)
                continue
            base = base or record["tokens_s"] / gpus
            share = 100 * record["tokens_s"] / (base * gpus)
            rate, peak = record["tokens_s"], record["peak_gb"]
            print(f"| {model} | {gpus} | {rate:,} | {share:.1f} % | {peak} GB |", flush=True)


if __name__ == "__main__":
    main()
