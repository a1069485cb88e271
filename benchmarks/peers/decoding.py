"""The peers' decoding of one token for 8 sequences with 16 heads of 128 channels, in bf16.

A case is given the context in tokens. It returns the step as a function, and whether a CUDA graph
can hold it. Caches are random, never zero; what a peer would keep of gates is there already.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from measure import import_fla

BATCH, HEADS, HEAD_DIM = 8, 16, 128


def normal(*size, dtype=torch.bfloat16):
    return torch.randn(*size, device="cuda", dtype=dtype)


def query_and_cache(context):
    """q [batch, 1, heads, head_dim], k and v [batch, context, heads, head_dim]."""
    return [normal(BATCH, tokens, HEADS, HEAD_DIM) for tokens in (1, context, context)]


def log_decays(*size):
    """Of gates near 1, in f32."""
    return -0.01 * normal(*size, dtype=torch.float32).abs()


def sdpa(context, backend):
    backend = getattr(SDPBackend, backend)
    q, k, v = (x.transpose(1, 2).contiguous() for x in query_and_cache(context))

    def step():
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v)

    return step, True


def fla_softmax(context, gates):
    """With gates, their prefix sum over the whole cache is computed in each step."""
    import_fla()
    from fla.ops.attn.decoding import attn_decoding_one_step

    packed = [x.reshape(1, -1, HEADS, HEAD_DIM) for x in query_and_cache(context)]
    starts = torch.arange(BATCH + 1, device="cuda") * context
    g = log_decays(1, BATCH * context, HEADS) if gates else None
    return lambda: attn_decoding_one_step(*packed, g, cu_seqlens=starts), not gates


def fox_of_its_authors(context):
    """The prefix sum over the whole cache is computed in each step."""
    from forgetting_transformer import forgetting_attention

    q, k, v = (x.transpose(1, 2).contiguous() for x in query_and_cache(context))
    log_decay = log_decays(BATCH, HEADS, context)
    return lambda: forgetting_attention(q, k, v, log_decay, head_first=True), False


def wall(context, chunk):
    """The cache holds k with its gates applied, from the start of a chunk on."""
    import_fla()
    from fla.ops.wall_attn import parallel_wall_attn_decode

    q, k, v = query_and_cache(context)
    chunks = -(-context // chunk)
    at_chunks = torch.linspace(0, -8, chunks, device="cuda").view(1, chunks, 1, 1)
    at_chunks = at_chunks.expand(BATCH, chunks, HEADS, HEAD_DIM).contiguous()
    now = torch.full((BATCH, 1, HEADS, HEAD_DIM), -8.0, device="cuda")
    scale = HEAD_DIM**-0.5
    return lambda: parallel_wall_attn_decode(q, v, now, k, at_chunks, None, scale, chunk)[0], True


def path(context):
    """Each step updates the whole cache of k, then attends to it."""
    import_fla()
    from fla.ops.attn.decoding import attn_decoding_one_step

    q, k, v = query_and_cache(context)
    w = F.normalize(normal(BATCH, 1, HEADS, HEAD_DIM, dtype=torch.float32), dim=-1)
    beta = 2 * torch.rand(BATCH, 1, HEADS, 1, device="cuda")
    starts = torch.arange(BATCH + 1, device="cuda") * context
    packed = lambda x: x.reshape(1, -1, HEADS, HEAD_DIM)

    @torch.compile(dynamic=False)
    def transformed(k):
        k32 = k.float()
        return (k32 - beta * (k32 * w).sum(-1, keepdim=True) * w).to(k.dtype)

    return lambda: attn_decoding_one_step(
        packed(q), packed(transformed(k)), packed(v), cu_seqlens=starts
    ), False


def gla(context):
    """The state's size does not depend on the context."""
    import_fla()
    from fla.ops.gla import fused_recurrent_gla

    q, k, v = (normal(BATCH, 1, HEADS, HEAD_DIM) for _ in range(3))
    gates = F.logsigmoid(normal(BATCH, 1, HEADS, HEAD_DIM, dtype=torch.float32))
    state = normal(BATCH, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True}
    return lambda: fused_recurrent_gla(q, k, v, gk=gates, **options)[0], True


def rwkv7(context):
    """As `gla`."""
    import_fla()
    from fla.ops.rwkv7 import fused_mul_recurrent_rwkv7

    r, k, v, kk, a = (normal(BATCH, 1, HEADS, HEAD_DIM) for _ in range(5))
    w = -0.6 * torch.rand(BATCH, 1, HEADS, HEAD_DIM, device="cuda").bfloat16()
    state = normal(BATCH, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True}
    return lambda: fused_mul_recurrent_rwkv7(r, w, k, v, kk, a, **options)[0], True


CASES = {
    "sdpa_flash": lambda context: sdpa(context, "FLASH_ATTENTION"),
    "sdpa_cudnn": lambda context: sdpa(context, "CUDNN_ATTENTION"),
    "fla_decode": lambda context: fla_softmax(context, gates=False),
    "fla_decode_fox": lambda context: fla_softmax(context, gates=True),
    "fot_decode": fox_of_its_authors,
    "wall_decode_c64": lambda context: wall(context, 64),
    "wall_decode_c128": lambda context: wall(context, 128),
    "path_decode": path,
    "gla_recurrent": gla,
    "rwkv7_recurrent": rwkv7,
}
