"""Times data-parallel training steps of PyTorch on this process's GPU: bench_ddp.py starts one process for each.

DistributedDataParallel, whose gradients are summed while the backward pass of a step's last micro-batch runs. bf16
autocast, fused AdamW, gradients clipped at norm 1, random rows that do not change. The request holds `attn`, `sizes`
(the fields of `Sizes`), `micro_batch`, `rows` (of a step, on all GPUs), `warmup` and `steps`.
"""

import contextlib
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.attention import sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from gpt2 import Gpt2, Sizes
from measure import emit
from train_worker import choose_backend, compile_model, groups


def main(request):
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", device_id=torch.device("cuda", gpu))
    sizes = Sizes(**request["sizes"])
    step = training_step(request["attn"], sizes, request["rows"], request["micro_batch"])
    seconds = []
    for _ in range(request["warmup"] + request["steps"]):
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    middle = statistics.median(seconds[request["warmup"] :])
    if dist.get_rank() == 0:
        rate = round(request["rows"] * sizes.seq_len / middle)
        peak = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        emit(gpus=dist.get_world_size(), tokens_s=rate, peak_gb=peak)
    dist.destroy_process_group()


def training_step(name, sizes, rows, micro_batch):
    """A function that trains for one step on this rank's rows."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    micro_batches = rows // dist.get_world_size() // micro_batch
    model = compile_model(Gpt2(name, sizes).cuda(), "block")
    optimiser = torch.optim.AdamW(groups(model), lr=6e-4, betas=(0.9, 0.95), fused=True)
    backend = choose_backend(name)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(0, sizes.vocab, (micro_batches, micro_batch, sizes.seq_len + 1), device="cuda")

    def step():
        for number, batch in enumerate(tokens):
            last = number + 1 == micro_batches
            with contextlib.nullcontext() if last else parallel.no_sync():
                with torch.autocast("cuda", dtype=torch.bfloat16), sdpa_kernel([backend]):
                    loss = parallel(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
                (loss / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return step


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
