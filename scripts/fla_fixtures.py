#!/usr/bin/env python3
"""Compares the fixtures of the tests of exchange with flash-linear-attention's model classes.

A fixture in crates/train/src/import/tests/fla is a config.json, the names and shapes of the class's tensors, and some
logits of the model whose weights a formula gives. The tests compute the same logits with the imported model.

    python3 scripts/fla_fixtures.py               # fails if a class gives other tensors or logits
    python3 scripts/fla_fixtures.py --write       # writes what the classes give
    python3 scripts/fla_fixtures.py --export DIR  # loads what `longwall export` wrote, and prints logits
    python3 scripts/fla_fixtures.py --kernels     # compares the replacements below with the library's kernels

Needs torch, transformers and flash-linear-attention 0.6, but no GPU: what the library has only as a Triton kernel is
replaced by its own reference in PyTorch, or by a few lines here. Without the packages, nothing is checked. Without a
GPU, --kernels runs them in Triton's interpreter, which takes minutes.
"""

import argparse
import json
import os
import sys
import warnings


def first_configuration_only():
    """Triton's autotuner measures on a GPU what it chooses among."""
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def with_one(self, fn, arg_names, configs, *args, **kwargs):
        init(self, fn, arg_names, configs[:1], *args, **kwargs)

    Autotuner.__init__ = with_one


try:
    import torch
    import torch.nn.functional as F
    import transformers

    import fixtures

    INTERPRETED = "--kernels" in sys.argv and not torch.cuda.is_available()
    if INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
        first_configuration_only()
    warnings.filterwarnings("ignore")
    import fla
    import fla.models
except ImportError as error:
    print(f"skipped: {error}\n  hint: pip install torch transformers flash-linear-attention==0.6.0")
    sys.exit(0)

FIXTURES = fixtures.folder("fla")


def rms_norm(x, weight, eps):
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def unit(x, eps=1e-6):
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def convolution(x, weight, silu=True):
    """x: [batch, tokens, channels]; weight: [channels, taps]."""
    taps = weight.shape[1]
    y = F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), weight[:, None], groups=weight.shape[0])
    return F.silu(y).transpose(1, 2) if silu else y.transpose(1, 2)


def module_norm(self, x, residual=None, prenorm=False, residual_in_fp32=False):
    if residual is not None:
        x = x + residual
    y = rms_norm(x, self.weight, self.eps)
    return (y, x) if prenorm else y


def group_norm(self, x, residual=None, prenorm=False, residual_in_fp32=False):
    assert self.is_rms_norm and residual is None and not prenorm
    heads = x.unflatten(-1, (self.num_groups, -1))
    return rms_norm(heads, None, self.eps).flatten(-2) * self.weight


def gated_norm(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):
    assert residual is None and not prenorm
    gate = {"swish": F.silu, "silu": F.silu, "sigmoid": F.sigmoid}[self.activation]
    return rms_norm(x, self.weight, self.eps) * gate(g)


def short_convolution(self, x, cache=None, output_final_state=False, cu_seqlens=None, **_):
    assert self.activation in ("silu", "swish") and self.bias is None and cache is None
    return convolution(x, self.weight.squeeze(1)), None


def causal_conv1d(x, weight, bias=None, activation=None, **_):
    assert activation in ("silu", "swish") and bias is None
    return convolution(x, weight), None


def gated_mlp(self, x, **_):
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def forgetting_attention(q, k, v, g, **_):
    from fla.ops.forgetting_attn.naive import naive_forgetting_attn

    return naive_forgetting_attn(q, k, v, g)


def gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, **options):
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    assert options["use_qk_l2norm_in_kernel"] and options["use_gate_in_kernel"]
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    g = -A_log.exp() * F.softplus(g + dt_bias)
    groups = v.shape[2] // q.shape[2]
    q, k = (unit(x).repeat_interleave(groups, 2) for x in (q, k))
    return naive_recurrent_gated_delta_rule(q, k, v, beta, g)


def kimi_delta_attention(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, **options):
    from fla.ops.kda.gate import naive_kda_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    assert options["use_qk_l2norm_in_kernel"] and options["use_gate_in_kernel"]
    assert options["lower_bound"] is None and not options.get("safe_gate")
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    return naive_recurrent_kda(unit(q), unit(k), v, naive_kda_gate(g, A_log, dt_bias), beta)


def gated_linear_attention(q, k, v, gk=None, g=None, **_):
    from fla.ops.gla.naive import naive_recurrent_gla

    return naive_recurrent_gla(q, k, v, g if gk is None else gk)


def linear_attention(q, k, v, normalize, **_):
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    return naive_recurrent_linear_attn(q, k, v, normalize=normalize)


def path_attention(q, k, v, w, beta, g=None, **_):
    from fla.ops.path_attn.naive import naive_path_attn

    assert q.shape[-1] in (16, 32, 64, 128)
    g = q.new_zeros(q.shape[:3]) if g is None else g
    # The reference pads all but v.
    return naive_path_attn(q, k, v, w, beta, g, q.shape[-1] ** -0.5), None


def rwkv7(r, w, k, v, a, b, **options):
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

    r, w, k, v, a, b = (x.transpose(1, 2) for x in (r, w, k, v, a, b))
    # The reference applies a scale of 1/√head_dim.
    o, _ = dplr_recurrence(r * r.shape[-1] ** 0.5, k, v, a, b, w)
    return o.transpose(1, 2), None


def rwkv7_of_rates(r, w, k, v, kk, a, **options):
    return rwkv7(r, w, k, v, -kk, kk * a, **options)


def token_shift(x, cu_seqlens=None, cache=None, output_cache=False, **_):
    from fla.modules.token_shift import token_shift_ref

    delta = token_shift_ref(x)
    return (delta, None) if output_cache else delta


def on_cpu():
    """Replaces what needs a GPU."""
    import fla.layers.forgetting_attn as forgetting
    import fla.layers.gated_deltanet as deltanet
    import fla.layers.gla as gla
    import fla.layers.kda as kda
    import fla.layers.linear_attn as linear
    import fla.layers.path_attn as path
    import fla.layers.rwkv7 as time_mix
    import fla.models.rwkv7.modeling_rwkv7 as rwkv7_model
    from fla import modules
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref

    modules.RMSNorm.forward = module_norm
    modules.GroupNorm.forward = group_norm
    modules.FusedRMSNormGated.forward = gated_norm
    modules.ShortConvolution.forward = short_convolution
    modules.GatedMLP.forward = gated_mlp
    forgetting.parallel_forgetting_attn = forgetting_attention
    deltanet.causal_conv1d = causal_conv1d
    deltanet.chunk_gated_delta_rule = gated_delta_rule
    deltanet.fused_recurrent_gated_delta_rule = gated_delta_rule
    kda.chunk_kda = kda.fused_recurrent_kda = kimi_delta_attention
    gla.chunk_gla = gla.fused_recurrent_gla = gated_linear_attention
    linear.chunk_linear_attn = linear.fused_recurrent_linear_attn = linear_attention
    path.parallel_path_attn = path_attention
    path.l2_norm = lambda x, **_: unit(x)
    time_mix.token_shift = rwkv7_model.token_shift = token_shift
    time_mix.fused_addcmul_rwkv7 = torch_addcmul_rwkv7
    time_mix.fused_k_rwkv7 = k_update_ref
    time_mix.gate_output_correction = gate_output_correction_ref
    time_mix.chunk_rwkv7 = rwkv7
    time_mix.fused_mul_recurrent_rwkv7 = rwkv7_of_rates


def check_export(folder):
    """Loads an exported folder: its tensors must be those of the class."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(folder, output_loading_info=True, dtype=torch.float32)
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value}
    print(f"{type(model).__name__}: {wrong or 'all tensors fit'}")
    for row in fixtures.logits(model.eval()):
        print(row)
    return not wrong


def check_kernels():
    """Logits of larger models with the kernels, and with the replacements."""
    device, tolerance = ("cpu", 1e-4) if INTERPRETED else ("cuda", 5e-3)  # TF32 on a GPU.
    # Beyond 64 tokens, most classes run chunks in place of the recurrence. The interpreter does not know all operations
    # of their kernels.
    lengths = (24,) if INTERPRETED else (24, 72)
    rows = {n: [(t * 37 + 11) % 257 for t in range(n)] for n in lengths}
    models = {}
    for path in sorted(FIXTURES.glob("*.json")):
        config = json.loads(path.read_text())["config"]
        for key in {"hidden_size", "intermediate_size", "head_dim"} & set(config):
            config[key] *= 4
        model = fixtures.of_class(config)[1].to(device)
        models[path.stem] = model, {n: fixtures.all_logits(model, tokens) for n, tokens in rows.items()}
    on_cpu()
    ok = True
    for name, (model, found) in models.items():
        for n, tokens in rows.items():
            expected = fixtures.all_logits(model, tokens)
            error = ((found[n] - expected).norm() / expected.norm()).item()
            ok &= error < tolerance
            print(f"{name}, {n} tokens: off by {error:.1e} of the logits' norm")
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write what the classes give")
    parser.add_argument("--export", metavar="DIR", help="load an exported folder instead")
    parser.add_argument("--kernels", action="store_true", help="compare with the kernels instead")
    arguments = parser.parse_args()
    if arguments.kernels:
        sys.exit(not check_kernels())
    on_cpu()
    if arguments.export:
        sys.exit(not check_export(arguments.export))
    sys.exit(not fixtures.check_all(FIXTURES, arguments.write))


if __name__ == "__main__":
    main()
