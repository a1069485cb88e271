"""The sizes of GPT-2's shape that training is timed at, and their batches. Needs no PyTorch."""

MODELS = {
    "124m": {"layers": 12, "heads": 12, "width": 768},
    "350m": {"layers": 24, "heads": 16, "width": 1024},
    "1.3b": {"layers": 24, "heads": 16, "width": 2048},
}

# Sequences and their length. bench_ddp.py takes the first of a model as its micro-batch.
BATCHES = {
    "124m": [(64, 1024), (16, 4096), (4, 16384), (2, 32768)],
    "350m": [(32, 1024), (8, 4096)],
    "1.3b": [(8, 2048)],
}
