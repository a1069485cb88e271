#!/usr/bin/env python3
"""Measures the GPU memory that training steps take, beside the estimate that training goes by.

  memory.py BINARY [OUT.toml] [--only REGEX] [--jobs N]

Every configuration in configs/gpu, and every attention kind and option of the model below, trains for two
steps of two micro-batches each by `longwall bench train`, each in a process of its own, as many at a time
as the GPUs hold. The peaks that the allocator reserved go to OUT after each case, by default the file that a
test of the train crate compares with the estimates of today; with --only, its other cases stay. Fails if a
case does not run.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "configs/gpu/gpt2_124m.toml"

# Attention of GPT-2 124M.
KINDS = [
    'kind = "rope"',
    'kind = "rope", ssmax = true',
    'kind = "rope", sinks = true',
    'kind = "fox"',
    'kind = "fox", prune = true',
    'kind = "wall"',
    'kind = "wall", gate_heads = "query"',
    'kind = "wall", gate_source = "key"',
    'kind = "wall", prune = true',
    'kind = "wall", forget_gate = true',
    'kind = "path"',
    'kind = "path", forget_gate = true',
    'kind = "power"',
    'kind = "power", p = 4',
    'kind = "tra"',
    'kind = "tda"',
    'kind = "rela"',
    'kind = "diff_rela"',
    'kind = "dex"',
    'kind = "lssar"',
    'kind = "entmax"',
    'kind = "stick_breaking"',
    'kind = "linear", gate = "none"',
    'kind = "linear", gate = "scalar"',
    'kind = "linear", gate = "none", feature_map = "elu", normalise = true',
    'kind = "mamba2"',
    'kind = "gated_delta_net"',
    'kind = "kda"',
    'kind = "rwkv7"',
    'kind = "linear"',
]
# Two views of half the heads.
VIEWS = ['kind = "diff"', 'kind = "diff", value_factor = 1']
# Rows long enough for a form with states.
LONG = ['kind = "power"']

OPTIONS = [
    ["model.mlp=swiglu"],
    ["model.qk_norm=true"],
    ["model.short_conv=true"],
    ["model.output_gate=true"],
    ["model.value_residual=learned"],
    ["model.token_shift=true"],
    ["model.norm_position=sandwich"],
    ["model.kv_heads=4"],
    ["model.tie_embeddings=false"],
    ['model.positions="learned"', 'model.attention={ kind = "rope", position = "none" }'],
    ["train.recompute=true"],
    ["train.recompute=true", 'model.attention={ kind = "tda" }'],
    ["train.ema=0.999"],
    ["train.noise_scale.every=10 steps"],
    ["run.precision=fp8"],
]


def cases():
    """(configuration, overrides, rows of a micro-batch or None for the default)"""
    for path in sorted((ROOT / "configs/gpu").glob("*.toml")):
        # Some name a tokenizer that is not shipped.
        yield str(path.relative_to(ROOT)), ['tokenizer={ kind = "gpt2" }'], None
    kind = lambda text: f"model.attention={{ {text} }}"
    for text in KINDS:
        yield BASE, [kind(text)], 32
    for text in VIEWS:
        yield BASE, [kind(text), "model.heads=6", "model.head_dim=64"], 32
    for text in LONG:
        yield BASE, [kind(text), "data.seq_len=16384"], 4
    for sets in OPTIONS:
        yield BASE, sets, 32


def longwall(binary, words, gpu=None):
    env = dict(os.environ)
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    done = subprocess.run([binary, *words], capture_output=True, text=True, cwd=ROOT, env=env)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-600:])
    return json.loads(done.stdout)


def arguments(config, sets):
    return ["--config", config, *(word for text in sets for word in ("--set", text)), "--json"]


class Gpus:
    """The memory of the GPUs, or of those that CUDA_VISIBLE_DEVICES names, that running cases have claimed."""

    def __init__(self):
        query = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
        rows = [line.split(", ") for line in subprocess.check_output(query, text=True).splitlines()]
        self.free = {index: 0.97 * 2**20 * int(size) for index, size in rows}
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            names = [name.strip() for name in visible.split(",")]
            if unknown := [name for name in names if name not in self.free]:
                sys.exit(f"CUDA_VISIBLE_DEVICES names {', '.join(unknown)}: give numbers out of {', '.join(self.free)}")
            self.free = {name: self.free[name] for name in names}
        self.most = max(self.free.values())
        self.changed = threading.Condition()

    def claim(self, size):
        with self.changed:
            while True:
                gpu = max(self.free, key=self.free.__getitem__)
                if self.free[gpu] >= size:
                    self.free[gpu] -= size
                    return gpu
                self.changed.wait()

    def give_back(self, gpu, size):
        with self.changed:
            self.free[gpu] += size
            self.changed.notify_all()


Case = namedtuple("Case", "config sets estimate")


def plan(binary, most, config, sets, rows):
    """A case with its batch, and what it is estimated to need; fewer rows if these do not fit."""
    seq_len = longwall(binary, ["info", *arguments(config, sets)])["stages"][0]["seq_len"]
    rows = rows or max(65536 // seq_len, 1)
    while True:
        sized = [*sets, f"train.micro_batch={rows}", f"train.batch_tokens={2 * rows * seq_len}"]
        info = longwall(binary, ["info", *arguments(config, sized)])
        estimate = info["train_memory_estimate_bytes"]
        if 1.15 * estimate <= most or rows == 1:
            return Case(config, sized, estimate)
        rows //= 2


def write(path, results, failed):
    """Writes the cases, those of an earlier run among them but for failed ones, in the order of cases()."""
    found = {}
    if path.exists():
        old = tomllib.loads(path.read_text())["measured"]
        found = {key(case["config"], case["set"]): tuple(case.values()) for case in old}
    found |= {key(config, sets): (config, sets, *rest) for config, sets, *rest in results}
    for case in failed:
        found.pop(key(case.config, case.sets), None)
    whole = path.with_suffix(".new")
    with whole.open("w") as out:
        out.write("# Written by benchmarks/memory.py: memory that the allocator reserved at most.\n")
        for config, sets, _ in cases():
            if key(config, sets) not in found:
                continue
            _, sets, peak, device = found[key(config, sets)]
            listed = ", ".join(json.dumps(text) for text in sets)
            out.write(f'\n[[measured]]\nconfig = "{config}"\nset = [{listed}]\n')
            out.write(f'peak_gb = {peak}\ndevice = "{device}"\n')
    whole.replace(path)


def key(config, sets):
    """A case without its batch."""
    batch = ("train.micro_batch=", "train.batch_tokens=")
    return config, *(text for text in sets if not text.startswith(batch))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "crates/train/src/memory/measured.toml")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if not os.access(options.binary, os.X_OK):
        parser.error(f"there is no program {options.binary}: build it with cargo build --release")
    if not options.out.resolve().parent.is_dir():
        parser.error(f"the folder of {options.out} does not exist: create it, or give another OUT")
    try:
        chosen = [case for case in cases() if re.search(options.only, " ".join([case[0], *case[1]]))]
    except re.error as error:
        parser.error(f"--only {options.only} is no regular expression: {error}")
    if not chosen:
        parser.error(f"--only {options.only} matches no case: give a part of a configuration's path or of an override")
    if not shutil.which("nvidia-smi"):
        sys.exit("nvidia-smi is missing: run this where an NVIDIA GPU is")
    binary = str(options.binary.resolve())
    gpus, results, failed = Gpus(), [], []
    with ThreadPoolExecutor(options.jobs) as pool:
        planned = list(pool.map(lambda case: plan(binary, gpus.most, *case), chosen))
    # The largest first, so that small ones fill what is left.
    queue = sorted(planned, key=lambda case: -case.estimate)
    lock = threading.Lock()

    def keep(cases, case):
        with lock:
            cases.append(case)
            write(options.out, results, failed)

    def work():
        while True:
            with lock:
                if not queue:
                    return
                case = queue.pop(0)
            name = " ".join([case.config, *case.sets])
            claim = min(1.2 * case.estimate + 2e9, gpus.most)
            gpu = gpus.claim(claim)
            try:
                words = ["bench", "train", "--steps", "1", "--warmup", "1"]
                report = longwall(binary, [*words, *arguments(case.config, case.sets)], gpu)
            except RuntimeError as error:
                keep(failed, case)
                print(f"FAILED {name}: {error}", flush=True)
                continue
            finally:
                gpus.give_back(gpu, claim)
            peak = report["peak_memory_bytes"]
            keep(results, (case.config, case.sets, round(peak / 1e9, 2), report["device"]))
            parts = report["estimated_memory"].items()
            text = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in parts)
            ratio = case.estimate / peak
            print(f"{ratio:.3f}  peak {peak / 1e9:6.2f} GB  {name}  ({text})", flush=True)

    threads = [threading.Thread(target=work) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(f"{len(failed)} cases failed" if failed else 0)


main()
