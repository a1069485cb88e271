"""GPT-2 in PyTorch, with the attention operation exchanged.

Tied embeddings, no biases, exact GELU, LayerNorm; learned positions with softmax attention and none
with the other kinds, as their papers have it. The kinds' own projections are those of their layers.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from measure import import_fla


@dataclass
class Sizes:
    layers: int
    heads: int
    width: int
    seq_len: int
    vocab: int = 50304


def linear(inputs, outputs, bias=False):
    return nn.Linear(inputs, outputs, bias=bias)


class Attention(nn.Module):
    """Projections of q, k and v, an operation, and the output's projection."""

    learned_positions = False

    def __init__(self, sizes):
        super().__init__()
        self.heads = sizes.heads
        self.qkv, self.proj = linear(sizes.width, 3 * sizes.width), linear(sizes.width, sizes.width)

    def split(self, x):
        """[batch, seq_len, width] to [batch, seq_len, heads, head_dim]."""
        return x.unflatten(-1, (self.heads, -1))

    def forward(self, x):
        q, k, v = (self.split(y) for y in self.qkv(x).chunk(3, -1))
        return self.proj(self.operation(x, q, k, v).to(x.dtype).flatten(2))


class Softmax(Attention):
    """PyTorch's scaled_dot_product_attention."""

    learned_positions = True

    def operation(self, x, q, k, v):
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Fox(Attention):
    """Forgetting attention: a gate a head."""

    def __init__(self, sizes, operation):
        super().__init__(sizes)
        self.gate = linear(sizes.width, sizes.heads, bias=True)
        self.attend = torch.compiler.disable(operation)

    def operation(self, x, q, k, v):
        return self.attend(q, k, v, F.logsigmoid(self.gate(x).float()))


class Wall(Attention):
    """Wall attention: a gate a channel, bounded below."""

    def __init__(self, sizes, operation):
        super().__init__(sizes)
        self.gate = linear(sizes.width, sizes.width, bias=True)
        self.attend = torch.compiler.disable(operation)

    def operation(self, x, q, k, v):
        log_decay = 0.86 * torch.expm1(F.logsigmoid(self.gate(x).float()) / 0.86)
        return self.attend(q, k, v, self.split(log_decay))


class Path(Attention):
    """PaTH attention: w of rank 32 and a convolution of three tokens, and β from 0 to 2."""

    def __init__(self, sizes, operation):
        super().__init__(sizes)
        self.down, self.up = linear(sizes.width, 32), linear(32, sizes.width)
        self.conv = nn.Parameter(torch.tensor([0.1, 0.1, 1.0])[:, None].repeat(1, sizes.width))
        self.beta = linear(sizes.width, sizes.heads, bias=True)
        self.attend = torch.compiler.disable(operation)

    def operation(self, x, q, k, v):
        w, seq_len = self.up(self.down(x)), x.shape[1]
        past = [w, *(F.pad(w, (0, 0, back, 0))[:, :seq_len] for back in (1, 2))]
        w = F.silu(sum(past[back] * self.conv[2 - back] for back in range(3)))
        w = F.normalize(self.split(w.float()), dim=-1)
        return self.attend(q, k, v, w, 2 * self.beta(x).float().sigmoid())


def attention(name, sizes):
    """The attention layer of an implementation in catalogue.TRAIN."""
    if name in ("sdpa", "cudnn"):
        return Softmax(sizes)
    if name == "fox_fot":
        from forgetting_transformer import forgetting_attention

        return Fox(sizes, forgetting_attention)
    import_fla()
    if name == "fox_fla":
        from fla.ops.forgetting_attn import parallel_forgetting_attn

        return Fox(sizes, parallel_forgetting_attn)
    if name == "wall_fla":
        from fla.ops.wall_attn import parallel_wall_attn

        return Wall(sizes, parallel_wall_attn)
    if name == "path_fla":
        from fla.ops.path_attn import parallel_path_attn

        return Path(sizes, lambda *inputs: parallel_path_attn(*inputs)[0])
    raise ValueError(f"{name} is no implementation of catalogue.TRAIN")


class Block(nn.Module):
    def __init__(self, name, sizes):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width, bias=False) for _ in range(2))
        self.attn = attention(name, sizes)
        self.mlp_up = linear(sizes.width, 4 * sizes.width)
        self.mlp_down = linear(4 * sizes.width, sizes.width)

    def forward(self, x):
        x = x + self.attn(self.norms[0](x))
        return x + self.mlp_down(F.gelu(self.mlp_up(self.norms[1](x))))


class Gpt2(nn.Module):
    def __init__(self, name, sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(Block(name, sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        learned = self.blocks[0].attn.learned_positions
        self.positions = nn.Embedding(sizes.seq_len, sizes.width) if learned else None
        self.initialise(sizes.layers)

    def initialise(self, layers):
        """Normal weights, smaller where they feed the residual stream; gates nearly open."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2 and not name.endswith("conv"):
                residual = name.endswith(("proj.weight", "mlp_down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if residual else 1))
            elif name.endswith("gate.bias"):
                nn.init.constant_(parameter, 3.0)

    def loss(self, x, targets):
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)
