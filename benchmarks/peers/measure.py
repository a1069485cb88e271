"""What workers share: reports, times by CUDA events, and imports of the peers' packages."""

import gc
import json
import statistics
import sys
import traceback
import types

import torch
import triton

from launch import MARK


def emit(**record):
    """Reports a result."""
    print(MARK + json.dumps(record), flush=True)


def emit_error(error, **about):
    """Reports an error. Raises it where the process can do nothing more on the GPU."""
    traceback.print_exc()
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    emit(**about, error=text[:300])
    if "CUDA error" in text or "illegal memory access" in text:
        raise error


def events(call, times):
    """Milliseconds of each of some calls, which are not waited for in between."""
    pairs = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def milliseconds(call, sample=60):
    """The median time of a call in samples of so many milliseconds. The L2 cache is flushed between
    calls, except between those that take longer than flushing matters.
    """
    events(call, 1)
    [estimate] = events(call, 1)
    if estimate > 80:
        more = 2 if estimate < 1500 else 1
        return statistics.median([estimate, *(events(call, 1)[0] for _ in range(more))])
    return triton.testing.do_bench(call, warmup=10, rep=sample, return_mode="median")


def free():
    """Gives the GPU's memory back."""
    gc.collect()
    torch.cuda.empty_cache()


def import_fla():
    """Imports flash-linear-attention without its layers and models, which need transformers."""
    hidden = [name for name in ("fla.layers", "fla.models") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None
    try:
        import fla.ops  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


def import_retention():
    """power_retention; the package names modules that newer versions of PyTorch have moved."""
    try:
        import torch.distributed._tensor  # noqa: F401
    except ImportError:
        import torch.distributed.tensor as moved

        sys.modules["torch.distributed._tensor"] = moved
    experimental = "torch.distributed.tensor.experimental"
    try:
        from torch.distributed.tensor.experimental import context_parallel  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType(experimental)
        stand_in.context_parallel = None
        sys.modules[experimental] = stand_in
    from retention.triton import power_retention

    return power_retention
