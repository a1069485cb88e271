"""The implementations that Longwall's attention kinds are compared with, and the module that each needs.

No other file lists the peers: the measuring scripts and tables.py read this one.
"""

TORCH, FLA, FOT, RETENTION = "torch", "fla", "forgetting_transformer", "retention"

# Implementations of a kind's operation: see operations.py.
KERNELS = {
    "softmax": {"sdpa_flash": TORCH, "sdpa_cudnn": TORCH, "fla_attn": FLA},
    "fox": {"fla_fox": FLA, "fot_fox": FOT, "fot_fox_acp": FOT},
    "wall": {"fla_wall": FLA},
    "path": {"fla_path": FLA},
    "power": {"power_attn": RETENTION, "power_c256": RETENTION, "power_c1024": RETENTION},
    "linear": {"fla_gla": FLA},
    "rwkv7": {"fla_rwkv7": FLA},
    "gated_delta_net": {"fla_gated_delta_net": FLA},
    "kda": {"fla_kda": FLA},
    "diff": {"sdpa_flash_diff": TORCH, "sdpa_cudnn_diff": TORCH},
    "diff_rela": {"sdpa_flash_views": TORCH, "sdpa_cudnn_views": TORCH},
    "tda": {"sdpa_flash_views": TORCH, "sdpa_cudnn_views": TORCH},
}

# Kinds with the inputs of softmax attention and no implementation of their own here: they are compared with that of
# softmax attention.
LIKE_SOFTMAX = ["rope", "dex", "entmax", "lssar", "rela", "stick_breaking", "tra"]

# Of decoding one token: see decoding.py.
DECODE = {
    "softmax": {"sdpa_flash": TORCH, "sdpa_cudnn": TORCH, "fla_decode": FLA},
    "fox": {"fla_decode_fox": FLA, "fot_decode": FOT},
    "wall": {"wall_decode_c64": FLA, "wall_decode_c128": FLA},
    "path": {"path_decode": FLA},
    "linear": {"gla_recurrent": FLA},
    "rwkv7": {"rwkv7_recurrent": FLA},
}

# Of training GPT-2's shape: see gpt2.py.
TRAIN = {
    "softmax": {"sdpa": TORCH, "cudnn": TORCH},
    "fox": {"fox_fla": FLA, "fox_fot": FOT},
    "wall": {"wall_fla": FLA},
    "path": {"path_fla": FLA},
}

# What every kind is compared with: FlashAttention-2, as PyTorch's scaled_dot_product_attention.
BASELINE, TRAIN_BASELINE = "sdpa_flash", "sdpa"

# The package that pip installs for a module, if there is one.
PACKAGES = {
    FLA: "flash-linear-attention",
    FOT: "the FoX authors' forgetting-transformer, from their repository",
}


def entry(kind):
    """A kind's place in the tables above; `rope` is softmax attention with a rotation before."""
    return "softmax" if kind in LIKE_SOFTMAX else kind


def peers_of(kind, table):
    """The names of the implementations that a kind is compared with."""
    return list(table.get(entry(kind), {}))


def chosen(table, kinds):
    """A table's entries for some kinds, those of softmax attention first and in any case."""
    kinds = ["softmax", *map(entry, kinds)]
    return {kind: table[kind] for kind in dict.fromkeys(kinds) if kind in table}
