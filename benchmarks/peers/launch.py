"""Starts workers and records what they report. Needs no PyTorch, which may be missing."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

# The prefix of a worker's lines that are results.
MARK = "@@"

ENVIRONMENT = """
import json, torch, triton
gpu = torch.cuda.get_device_properties(0)
print(json.dumps({"gpu": gpu.name, "torch": torch.__version__, "triton": triton.__version__,
                  "cudnn": torch.backends.cudnn.version()}))
"""


def words(text):
    """Splits an option's value at commas and spaces."""
    return text.replace(",", " ").split()


def words_of(allowed):
    """What splits an option's value like `words`, and refuses words that are not allowed."""

    def split(text):
        found = words(text)
        if unknown := [word for word in found if word not in allowed]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; allowed: {', '.join(allowed)}")
        return found

    return split


def installed(module):
    """Whether a module can be imported; it is not imported."""
    return importlib.util.find_spec(module) is not None


class Results:
    """Writes records to a file, one JSON object a line, and to stderr."""

    def __init__(self, out, name):
        Path(out).mkdir(parents=True, exist_ok=True)
        self.lines = open(Path(out) / f"{name}.jsonl", "w")
        self.log = open(Path(out) / f"{name}.log", "w")

    def write(self, **record):
        line = json.dumps(record)
        print(line, file=sys.stderr, flush=True)
        print(line, file=self.lines, flush=True)

    def can_run(self):
        """Whether PyTorch and a GPU are there; otherwise a record says what is missing."""
        if not installed("torch"):
            self.write(missing="torch", names=["every peer"])
            return False
        found = subprocess.run([sys.executable, "-c", ENVIRONMENT], capture_output=True, text=True)
        if found.returncode != 0:
            self.log.write(found.stderr)
            self.write(missing="a GPU that PyTorch and Triton can use", names=["every peer"])
            return False
        self.write(env=json.loads(found.stdout.splitlines()[-1]))
        return True

    def present(self, modules):
        """The implementations whose modules are installed; records say which are not."""
        missing = {}
        for name, module in modules.items():
            if not installed(module):
                missing.setdefault(module, []).append(name)
        for module, names in missing.items():
            self.write(missing=module, names=names)
        return [name for name, module in modules.items() if module not in missing]

    def follow(self, worker, about, seconds):
        """Writes what a worker reports until it ends, or is ended after so many seconds."""
        timer = threading.Timer(seconds, worker.kill)
        timer.start()
        for line in worker.stdout:
            if line.startswith(MARK):
                self.write(**json.loads(line[len(MARK) :]))
        late = not timer.is_alive()
        timer.cancel()
        if worker.wait() != 0:
            reason = f"took over {seconds:.0f} s" if late else f"ended with {worker.returncode}"
            self.write(**about, error=f"{reason}; see {Path(self.log.name).name}")


def start(script, request, log, heard=True, caches="", threads=1):
    """A worker: a script beside this one, with a request as JSON. Its stderr goes to the log, and
    so does its stdout unless it is `heard`. Compiled kernels are kept from run to run, those of
    PyTorch's compiler in a folder whose name ends with `caches`.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(home) / "longwall-peers"
    env = dict(
        os.environ,
        TRITON_CACHE_DIR=str(cache / "triton"),
        TORCHINDUCTOR_CACHE_DIR=str(cache / f"inductor{caches}"),
        TORCHINDUCTOR_COMPILE_THREADS=str(threads),
        FLA_CACHE_RESULTS="0",
        PYTHONUNBUFFERED="1",
        TOKENIZERS_PARALLELISM="false",
    )
    command = [sys.executable, str(Path(__file__).parent / script), json.dumps(request)]
    stdin, stdout = (subprocess.PIPE, subprocess.PIPE) if heard else (subprocess.DEVNULL, log)
    files = {"stdin": stdin, "stdout": stdout, "stderr": log}
    return subprocess.Popen(command, **files, env=env, text=True, bufsize=1)
