"""Bounds Triton's autotuning. Peers list up to 108 configurations a kernel, each of which takes
seconds to compile; each kernel chooses among a fixed sample of them here.

A long sequence takes the configuration that won at a shorter one with the same head_dim: trying
even a few takes too long there.
"""

import itertools
import random
import statistics

from triton.runtime.autotuner import Autotuner

from measure import events

# Wall's good ones on Hopper: BT, BS, warps, stages.
WALL = [
    (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 2), (64, 32, 4, 2),
    (128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 8, 2), (64, 64, 8, 2),
]  # fmt: skip

# The order in which numbers of warps take their turn.
WARPS = [4, 8, 2, 1, 16]


class Tuning:
    """How kernels of this process are tuned."""

    def __init__(self, most, shard=0, shards=1, compile_only=False):
        self.most = most  # configurations a kernel chooses among
        self.shard, self.shards = shard, shards  # which of them this process compiles
        self.compile_only = compile_only  # run each once, and take any
        self.case = None  # what is measured: winners are kept for it
        self.reuse = False  # take the winner of the case
        self.winners = {}

    def install(self):
        """Makes Triton's autotuner follow these rules."""
        tuning, init, run = self, Autotuner.__init__, Autotuner.run

        def bounded_init(self, fn, arg_names, configs, key, *args, **options):
            for option in ("warmup", "rep", "use_cuda_graph"):
                options.pop(option, None)
            if "cache_results" in options:
                options["cache_results"] = False
            configs = tuning.bounded(configs, name_of(fn)) if configs else configs
            init(self, fn, arg_names, configs, key, *args, **options)
            self._do_bench = tuning.time

        def bounded_run(self, *args, **options):
            key, all_configs = (id(self), tuning.case), self.configs
            if tuning.reuse and key in tuning.winners:
                self.configs = [tuning.winners[key]]
            try:
                result = run(self, *args, **options)
            finally:
                self.configs = all_configs
            if not tuning.reuse:
                tuning.winners[key] = self.best_config
            return result

        Autotuner.__init__, Autotuner.run = bounded_init, bounded_run

    def bounded(self, configs, name):
        """The configurations that the kernel called `name` chooses among."""
        configs = list(configs)
        if "decod" in name or len(configs) <= self.most:
            some = configs
        elif "wall_attn" in name:
            keys = ("BT", "BS")
            known = {(*map(c.kwargs.get, keys), c.num_warps, c.num_stages): c for c in configs}
            some = [known[pick] for pick in WALL if pick in known] or configs
        else:
            some = sample(configs)
        some = some if "decod" in name else some[: self.most]
        return some[self.shard :: self.shards] or some[:1]

    def time(self, call, quantiles=None, **_):
        """Milliseconds of a call: the autotuner's measurement, shorter than Triton's own."""
        call()
        if self.compile_only:
            return [1.0, 1.0, 1.0]
        estimate = max(events(call, 1)[0], 1e-3)
        median = statistics.median(events(call, int(max(2, min(20, 12.0 / estimate)))))
        return [median, median, median]


def name_of(fn):
    """The name of a kernel, which decorators may hide."""
    while not hasattr(fn, "__name__") and hasattr(fn, "fn"):
        fn = fn.fn
    return getattr(fn, "__name__", "")


def sample(configs):
    """A fixed order that goes round the numbers of warps, the usual two or three stages first."""
    generator, by_warps = random.Random(1234), {}
    for config in configs:
        by_warps.setdefault(config.num_warps, []).append(config)
    for group in by_warps.values():
        generator.shuffle(group)
        group.sort(key=lambda config: config.num_stages not in (2, 3))
    turns = sorted(by_warps, key=lambda warps: WARPS.index(warps) if warps in WARPS else len(WARPS))
    rounds = itertools.zip_longest(*(by_warps[warps] for warps in turns))
    return [config for one in rounds for config in one if config is not None]
