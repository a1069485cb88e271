"""Measures, or compiles, one kind's peers: bench_peers.py starts it.

The request holds `shapes`, the names of `kernels` and `decode`, `configs`, `tuned_len`, and with
`shard` [which, of how many] compiles a part of the kernels. Without a shard it waits for a line on
stdin before it measures.
"""

import json
import sys
import traceback

import torch
import triton

import decoding
import operations
from autotune import Tuning
from catalogue import FLA
from launch import installed
from measure import emit, emit_error, free, import_fla, milliseconds

CONTEXTS = [4096, 32768, 131072]

# Compilation runs the operations at up to this length.
COMPILED_LEN = 2048

# A call that is predicted to take longer is left out, in milliseconds.
LONGEST_CALL = 3000.0


def main(request):
    shard = request.get("shard")
    tuning = Tuning(request["configs"], *(shard or (0, 1)), compile_only=shard is not None)
    tuning.install()
    torch.zeros(1, device="cuda")
    if installed(FLA):
        import_fla()
    if shard:
        return compile_all(request)
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit(1)  # The parent process has ended.
    past = {}
    for shape in request["shapes"]:
        tuning.case, tuning.reuse = shape[3], shape[2] > request["tuned_len"]
        for name in request.get("kernels", []):
            measure_operation(name, shape, past)
    tuning.reuse = False
    for context in CONTEXTS:
        for name in request.get("decode", []):
            measure_decoding(name, context)


def compile_all(request):
    """Runs everything once on short inputs."""
    shapes = [(b, h, min(t, COMPILED_LEN), d) for b, h, t, d in request["shapes"]]
    for shape in dict.fromkeys(shapes):
        for name in request.get("kernels", []):
            try_once(lambda name, shape: passes(name, shape)["fwdbwd"], name, shape)
    for name in request.get("decode", []):
        try_once(lambda name: decoding.CASES[name](CONTEXTS[0])[0], name)


def try_once(make, *case):
    """Makes a call and calls it; an error is reported by whoever measures it."""
    try:
        free()
        make(*case)()
    except Exception:
        traceback.print_exc()


def passes(name, shape):
    """The forward pass, with what training keeps for backward, and that with the backward pass."""
    forward, tensors = operations.prepare(name, shape)
    gradient = torch.randn_like(forward())
    both = lambda: torch.autograd.grad(forward(), tensors, gradient, allow_unused=True)
    return {"fwd": forward, "fwdbwd": both}


def measure_operation(name, shape, past):
    """Reports a time of each pass. `past` holds the last times, and the work of their shapes."""
    batch, heads, seq_len, head_dim = shape
    work = batch * heads * seq_len**2 * head_dim
    about = {"impl": name, "shape": shape}
    try:
        free()
        calls = passes(name, shape)
    except Exception as error:
        return emit_error(error, **about)
    for pass_name, call in calls.items():
        about["pass"] = pass_name
        time_then, work_then = past.get((name, pass_name), (0.0, work))
        predicted = time_then * work / work_then
        if predicted > LONGEST_CALL:
            emit(**about, error=f"left out: a call would take about {predicted / 1e3:.0f} s")
            continue
        try:
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            ms = milliseconds(call)
        except Exception as error:
            emit_error(error, **about)
            continue
        past[name, pass_name] = (ms, work)
        emit(**about, ms=round(ms, 4), peak_mb=round(peak / 2**20))


def measure_decoding(name, context):
    """Reports a step's time, and that in a CUDA graph, where launches cost nothing."""
    shape = [decoding.BATCH, decoding.HEADS, context, decoding.HEAD_DIM]
    about = {"impl": name, "shape": shape, "pass": "decode"}
    try:
        free()
        with torch.no_grad():
            step, capturable = decoding.CASES[name](context)
            ms, in_graph = milliseconds(step, sample=40), None
            if capturable and ms < 20:
                median = {"rep": 20, "return_mode": "median"}
                in_graph = round(triton.testing.do_bench_cudagraph(step, **median), 4)
        emit(**about, ms=round(ms, 4), ms_graph=in_graph)
    except Exception as error:
        emit_error(error, **about)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
