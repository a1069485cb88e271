"""Fixtures of the tests of exchange: what the scripts for transformers' and flash-linear-attention's classes share.

A fixture is a config.json, the names and shapes of the class's tensors, and some logits of the model whose weights a
formula gives.
"""

import json
import math
from pathlib import Path

import torch
import transformers

TOKENS = [(t * 37 + 11) % 257 for t in range(24)]
PLACES, VOCABULARY = [0, 11, 23], [0, 100, 256]
TOLERANCE = 2e-5


def folder(name):
    return Path(__file__).parent.parent / "crates/train/src/import/tests" / name


def weight(name, shape, head_dim):
    """The formula of the tests: norms of heads repeat the values of one head."""
    at = torch.arange(math.prod(shape), dtype=torch.float64)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        at = at % head_dim
    wave = (at * 0.37 + sum(name.encode())).sin()
    is_scale = name.endswith("weight") and len(shape) == 1
    return (1 + 0.1 * wave if is_scale else 0.3 * wave).float().reshape(shape)


def logits(model):
    out = all_logits(model, TOKENS)
    return [[round(out[place, token].item(), 6) for token in VOCABULARY] for place in PLACES]


def all_logits(model, tokens):
    """[tokens, vocabulary]"""
    with torch.no_grad():
        return model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0]


def of_class(config):
    """Names and shapes of the class's tensors, and the model with the formula's weights."""
    options = {key: value for key, value in config.items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**options)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    heads = getattr(config, "num_heads", None) or config.num_attention_heads
    head_dim = config.hidden_size // heads
    tensors = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    state = {name: weight(name, shape, head_dim) for name, shape in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return tensors, model


def dumped(fixture):
    """JSON with a tensor, a key or a row of logits on each line."""
    def part(value):
        items = value.items() if isinstance(value, dict) else ((None, v) for v in value)
        lines = [(f"{json.dumps(k)}: " if k else "") + json.dumps(v) for k, v in items]
        left, right = "{}" if isinstance(value, dict) else "[]"
        return left + "\n    " + ",\n    ".join(lines) + "\n  " + right

    return "{\n  " + ",\n  ".join(f'"{k}": {part(v)}' for k, v in fixture.items()) + "\n}\n"


def check(path, write):
    fixture = json.loads(path.read_text())
    tensors, model = of_class(fixture["config"])
    found = logits(model)
    fresh = {"config": fixture["config"], "tensors": tensors, "logits": found}
    if write:
        path.write_text(dumped(fresh))
        print(f"{path.stem}: written")
        return True
    rows = zip(sum(found, []), sum(fixture["logits"], []))
    worst = max(abs(a - b) for a, b in rows)
    ok = tensors == fixture["tensors"] and worst < TOLERANCE
    print(f"{path.stem}: {'ok' if ok else 'DIFFERS'}, logits off by up to {worst:.1e}")
    return ok


def check_all(folder, write):
    """Compares all fixtures of a folder with their classes, or writes them; whether they are as the classes say."""
    results = [check(path, write) for path in sorted(folder.glob("*.json"))]
    assert results, f"no fixtures in {folder}"
    return all(results)
