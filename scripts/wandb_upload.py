#!/usr/bin/env python3
"""Sends a run's metrics and configuration to Weights & Biases, or to trackio.

    python3 scripts/wandb_upload.py runs/NAME                 # all that is not sent yet
    python3 scripts/wandb_upload.py runs/NAME --to trackio
    python3 scripts/wandb_upload.py runs/NAME --dry-run       # prints what it would send, as JSON lines

It reads metrics.jsonl, under the names that TensorBoard shows and `longwall log export --csv` writes, and config.toml.
What was sent is noted in the run's uploads.json, and left out the next time: run it again while a run trains, or after
it was resumed. The last step of a run that has not finished is held back, because its validation may still follow.
Needs Python 3.11, and wandb or trackio (pip install), with which you have logged in before; --dry-run needs neither.
"""

import argparse
import importlib
import json
import math
import re
import sys
import tomllib
from pathlib import Path

# Keys of a record, and the scalars' names.
STEP = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr",
    "tokens_per_second": "train/tokens_per_second", "z_loss": "train/z_loss", "mfu": "train/mfu",
    "batch_tokens": "train/batch_tokens", "seq_len": "train/seq_len", "window": "train/window",
}  # fmt: skip
VALIDATION = {
    "validation_loss": "validation/loss", "perplexity": "validation/perplexity",
    "bits_per_byte": "validation/bits_per_byte", "best_context_loss": "validation/best_context_loss",
    "ema_validation_loss": "validation/ema_loss",
}  # fmt: skip
NOISE = {
    "noise_scale": "gradient_noise/scale", "noise_trace": "gradient_noise/trace",
    "gradient_square": "gradient_noise/gradient_square",
}  # fmt: skip


def scalars(record):
    """The named numbers of a line of metrics.jsonl; what is null there, because it is not finite, is left out."""
    named = {}
    for names in (STEP, VALIDATION, NOISE):
        named |= {name: record[key] for key, name in names.items() if key in record}
    for name, value in record.get("probe", {}).items():
        named[f"validation/{name}"] = value
    for layer, norms in record.get("layers", {}).items():
        named |= {f"layers/{layer}/{name}": value for name, value in norms.items()}
    return {name: value for name, value in named.items() if value is not None and math.isfinite(value)}


def by_step(path):
    """The scalars and the tokens of each step, in order. Uploads take a step once, with all that belongs to it."""
    steps = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            row = steps.setdefault(record["step"], {"tokens": record["tokens"]})
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"{path}:{number}: no metrics record: {error}\n  hint: every line must be one that training wrote")
        row |= scalars(record)
    return sorted(steps.items())


class Sent:
    """The last step that was sent to each destination."""

    def __init__(self, run, destination):
        self.path, self.key = run / "uploads.json", destination
        self.all = json.loads(self.path.read_text()) if self.path.exists() else {}

    def step(self):
        return self.all.get(self.key, 0)

    def note(self, step):
        self.all[self.key] = step
        self.path.write_text(json.dumps(self.all, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--to", choices=["wandb", "trackio"], default="wandb")
    parser.add_argument("--project", default="longwall", help="by default longwall")
    parser.add_argument("--name", help="by default the folder's name; also the run's id")
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, as JSON lines")
    arguments = parser.parse_args()
    run = arguments.run
    for name in ("metrics.jsonl", "config.toml"):
        if not (run / name).is_file():
            sys.exit(f"{run / name} does not exist\n  hint: give the folder of a run, for example runs/NAME")
    steps = by_step(run / "metrics.jsonl")
    if not (run / "finished.json").exists():
        steps = steps[:-1]
    name = arguments.name or run.resolve().name
    # What neither allows in an id becomes a hyphen.
    start = {"project": arguments.project, "name": name, "id": re.sub(r"[^\w.-]", "-", name)}
    sent = Sent(run, f"{arguments.to}/{start['project']}/{start['id']}")
    start["config"] = tomllib.loads((run / "config.toml").read_text())
    rest = [(step, row) for step, row in steps if step > sent.step()]
    if arguments.dry_run:
        for value in [start, *({"step": step} | row for step, row in rest)]:
            print(json.dumps(value))
        return
    if rest:
        send(arguments.to, start, rest, sent)
    print(f"{len(rest)} steps sent, {len(steps) - len(rest)} were there", file=sys.stderr)


def send(destination, start, rest, sent):
    """Logs the steps under their numbers. The two libraries share this interface, except that trackio knows a run by
    its name alone."""
    try:
        library = importlib.import_module(destination)
    except ImportError as error:
        sys.exit(f"{error}\n  hint: pip install {destination}")
    if destination == "trackio":
        start = {key: value for key, value in start.items() if key != "id"}
    library.init(**start, resume="allow")
    for step, row in rest:
        library.log(row, step=step)
    library.finish()
    sent.note(rest[-1][0])


if __name__ == "__main__":
    main()
