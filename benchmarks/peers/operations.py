"""The peers' attention operations on random inputs, none of which is zero.

Shapes are (batch, heads, seq_len, head_dim). Every operation is causal and in bf16; gates and their
like are drawn as the operations' authors draw them, in f32 unless said.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from measure import import_fla, import_retention

# The least log decay of an RWKV-7 step, −exp(−0.5).
RWKV7_DECAY = -0.6065306597126334


def inputs(name, shape):
    """A random input, [batch, seq_len, heads, head_dim] or [batch, seq_len, heads]."""
    batch, heads, seq_len, head_dim = shape
    per_head = (batch, seq_len, heads)
    normal = lambda *size: torch.randn(*size, device="cuda")
    wide = lambda: normal(*per_head, head_dim)
    rates = lambda *size: torch.empty(*size, device="cuda").uniform_(1, 16)  # of a step's decay
    match name:
        case "q" | "k" | "v" | "r":
            return wide().bfloat16()
        case "wide_v":  # twice the channels
            return normal(*per_head, 2 * head_dim).bfloat16()
        case "fox_log_decay":  # logits from 0 to 10, the range of the FoX authors' benchmark
            return F.logsigmoid(torch.empty(per_head, device="cuda").uniform_(0, 10))
        case "power_log_decay":  # around a gate of 0.999
            return F.logsigmoid(6.906768 + normal(*per_head))
        case "path_w":  # unit vectors
            return F.normalize(wide(), dim=-1)
        case "path_beta":  # from 0 to 2
            return 2 * normal(*per_head).sigmoid()
        case "wall_log_decay":  # bounded below, logits around 2.5
            return 0.86 * torch.expm1(F.logsigmoid(wide() + 2.5) / 0.86)
        case "gla_log_decay":
            return F.logsigmoid(wide()).clamp_min(-5).bfloat16()
        case "rwkv7_log_decay":
            return (RWKV7_DECAY * wide().sigmoid()).clamp(RWKV7_DECAY, -1e-6).bfloat16()
        case "delta_beta":
            return normal(*per_head).sigmoid()
        case "gdn_log_decay":  # steps of 0.001 to 0.1, as the layer's at the start
            return -torch.empty(per_head, device="cuda").uniform_(0.001, 0.1) * rates(heads)
        case "kda_log_decay":  # as the layer's with channels that remember
            return -F.softplus(wide() - 3) * rates(heads, 1)
        case "rwkv7_a" | "rwkv7_b":
            return (0.1 * wide()).bfloat16()
    raise KeyError(name)


def sdpa(backend):
    """PyTorch's scaled_dot_product_attention on one of its backends."""
    backend = getattr(SDPBackend, backend)

    def call(q, k, v):
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def two_views(backend):
    """Differential attention: two maps of weights, one subtracted from the other, on the same values.

    A call takes values of as many channels as queries have: wider ones are split, as in the authors' code.
    """
    attend = sdpa(backend)

    def call(q, k, v, q2, k2):
        parts = v.split(q.shape[-1], dim=-1)
        first, second = (
            torch.cat([attend(*view, part.contiguous()) for part in parts], dim=-1)
            for view in ((q, k), (q2, k2))
        )
        return first - 0.5 * second

    return call


def fox_of_its_authors(threshold):
    """The Forgetting Transformer's kernel, pruned where the threshold is "auto"."""
    from forgetting_transformer import forgetting_attention

    options = {"head_first": True, "adaptive_threshold": threshold}
    return lambda q, k, v, log_decay: forgetting_attention(q, k, v, log_decay, **options)


def fla(module, function, first=False, **options):
    """A function of flash-linear-attention; of some, the first result is the output."""
    import_fla()
    call = getattr(__import__(f"fla.ops.{module}", fromlist=[function]), function)
    if first:
        return lambda *tensors: call(*tensors, **options)[0]
    return lambda *tensors: call(*tensors, **options)


def power(shape, chunk):
    """Power retention of degree 2: the attention form, or chunks of so many tokens."""
    _, _, seq_len, head_dim = shape
    if chunk is not None and head_dim > 64:
        raise NotImplementedError("its chunked form supports a head_dim of up to 64")
    if chunk is not None and seq_len <= chunk:
        raise NotImplementedError(f"{seq_len} tokens are one chunk: the attention form runs")
    retention = import_retention()
    return lambda q, k, v, log_decay: retention(q, k, v, log_decay, deg=2, chunk_size=chunk)


# Each gives the names of its inputs, whether heads come before tokens in them, and the operation.
QKV = ["q", "k", "v"]
FOX, POWER = [*QKV, "fox_log_decay"], [*QKV, "power_log_decay"]
VIEWS, WIDE_VIEWS = [*QKV, "q", "k"], ["q", "k", "wide_v", "q", "k"]
PATH = [*QKV, "path_w", "path_beta"]
GDN, KDA = [*QKV, "gdn_log_decay", "delta_beta"], [*QKV, "kda_log_decay", "delta_beta"]
RWKV7 = ["r", "rwkv7_log_decay", "k", "v", "rwkv7_a", "rwkv7_b"]
UNIT_KEYS = {"use_qk_l2norm_in_kernel": True}
OPERATIONS = {
    "sdpa_flash": (QKV, True, lambda shape: sdpa("FLASH_ATTENTION")),
    "sdpa_cudnn": (QKV, True, lambda shape: sdpa("CUDNN_ATTENTION")),
    "sdpa_flash_views": (VIEWS, True, lambda shape: two_views("FLASH_ATTENTION")),
    "sdpa_cudnn_views": (VIEWS, True, lambda shape: two_views("CUDNN_ATTENTION")),
    "sdpa_flash_diff": (WIDE_VIEWS, True, lambda shape: two_views("FLASH_ATTENTION")),
    "sdpa_cudnn_diff": (WIDE_VIEWS, True, lambda shape: two_views("CUDNN_ATTENTION")),
    "fla_attn": (QKV, False, lambda shape: fla("attn", "parallel_attn")),
    "fla_fox": (FOX, False, lambda shape: fla("forgetting_attn", "parallel_forgetting_attn")),
    "fot_fox": (FOX, True, lambda shape: fox_of_its_authors(None)),
    "fot_fox_acp": (FOX, True, lambda shape: fox_of_its_authors("auto")),
    "fla_wall": (
        [*QKV, "wall_log_decay"], False, lambda shape: fla("wall_attn", "parallel_wall_attn"),
    ),
    "fla_path": (PATH, False, lambda shape: fla("path_attn", "parallel_path_attn", first=True)),
    "power_attn": (POWER, False, lambda shape: power(shape, None)),
    "power_c256": (POWER, False, lambda shape: power(shape, 256)),
    "power_c1024": (POWER, False, lambda shape: power(shape, 1024)),
    "fla_gla": ([*QKV, "gla_log_decay"], False, lambda shape: fla("gla", "chunk_gla", first=True)),
    "fla_gated_delta_net": (
        GDN, False,
        lambda shape: fla("gated_delta_rule", "chunk_gated_delta_rule", first=True, **UNIT_KEYS),
    ),
    "fla_kda": (KDA, False, lambda shape: fla("kda", "chunk_kda", first=True, **UNIT_KEYS)),
    "fla_rwkv7": (
        RWKV7, False,
        lambda shape: fla("rwkv7", "chunk_rwkv7", first=True, safe_gate=True, chunk_size=64),
    ),
}  # fmt: skip


def prepare(name, shape):
    """An operation as a function without arguments, and the tensors that it depends on."""
    names, heads_first, make = OPERATIONS[name]
    operation = make(shape)
    torch.manual_seed(0)
    tensors = [inputs(name, shape) for name in names]
    if heads_first:
        tensors = [x.transpose(1, 2) for x in tensors]
    tensors = [x.contiguous().requires_grad_() for x in tensors]
    return lambda: operation(*tensors), tensors
