"""Times training steps of one case: bench_train.py starts it.

bf16 autocast, fused AdamW, gradients clipped at norm 1, one random batch that does not change, so
that the loss must fall. The request holds `attn`, `model`, `B`, `T`, `compile` and `configs`.
"""

import json
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from autotune import Tuning
from gpt2 import Gpt2, Sizes
from measure import emit, emit_error, events
from models import MODELS


def main(request):
    about = {key: request[key] for key in ("attn", "model", "B", "T", "compile")}
    try:
        Tuning(request["configs"]).install()
        sizes = Sizes(**MODELS[request["model"]], seq_len=request["T"])
        emit(**about, **measure(request["attn"], sizes, request["B"], request["compile"]))
    except Exception as error:
        emit_error(error, **about)


def measure(name, sizes, batch, compiled):
    """Tokens a second of steps that follow each other without a wait, and the memory they take."""
    step = training_step(name, sizes, batch, compiled)
    first = float(step().detach())
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    waited = statistics.median(events(step, 1)[0] for _ in range(8))
    steps = max(4, min(20, int(3000 / waited)))
    started = time.perf_counter()
    for _ in range(steps):
        loss = step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / steps
    return {
        "tokens_s": round(batch * sizes.seq_len / seconds),
        "ms_step": round(1e3 * seconds, 2),
        "ms_step_waited": round(waited, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss_first": round(first, 3),
        "loss_last": round(float(loss.detach()), 3),
    }


def training_step(name, sizes, batch, compiled):
    """A function that trains for one step and returns the loss."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = Gpt2(name, sizes).cuda()
    optimiser = torch.optim.AdamW(groups(model), lr=6e-4, betas=(0.9, 0.95), fused=True)
    backend = choose_backend(name)
    forward = compile_model(model, compiled)
    tokens = torch.randint(0, sizes.vocab, (batch, sizes.seq_len + 1), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16), sdpa_kernel([backend]):
            loss = forward(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss

    return step


def choose_backend(name):
    """What scaled_dot_product_attention runs."""
    if name != "cudnn":
        return SDPBackend.FLASH_ATTENTION
    # Compiled code chooses a backend when it is traced: allow only this one.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    return SDPBackend.CUDNN_ATTENTION


def compile_model(model, compiled):
    """The model, compiled whole or block by block; the peers' operations are not traced."""
    if compiled == "whole":
        return torch.compile(model)
    for block in model.blocks:
        block.compile()
    model.loss = torch.compile(model.loss)
    return model


def groups(model):
    """Parameters with weight decay, and vectors without."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
