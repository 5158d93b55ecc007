"""Measures how large the activations of a model are, step by step, for a coordinate check.

Source: Yang et al. 2022 (arXiv:2203.03466), appendix D.1: in a parametrization whose hyperparameters transfer, no
activation grows with the width after some updates.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.verify.ranks import run_ranks

Sizes = dict[str, list[float]]
"""Mean absolute value of the output in each step, by module, in the order of a forward pass."""

LOGITS = "output_layer"


def activation_sizes(flags: Sequence[str], steps: int) -> Sizes:
    """Train `steps` steps with the flags of pretrain_gpt.py in one process, and return the sizes of activations."""
    [sizes] = run_ranks(1, _sizes, [*flags, "--device", "cpu"], steps)
    return sizes


def growth(by_width: Mapping[int, Sizes], step: int = -1) -> dict[str, float]:
    """Return for each module by what its output grows where the width doubles, as a power of 2 fitted to all widths: 0
    stays, 1 doubles."""
    widths = [math.log2(width) for width in by_width]
    mean = sum(widths) / len(widths)
    found = {}
    for name in next(iter(by_width.values())):
        logs = [math.log2(sizes[name][step]) for sizes in by_width.values()]
        products = sum((width - mean) * log for width, log in zip(widths, logs, strict=True))
        found[name] = products / sum((width - mean) ** 2 for width in widths)
    return found


def _sizes(flags: list[str], steps: int) -> Sizes:
    from megatron_ext.model.names import unwrapped
    from megatron_ext.train.extensions import NONE
    from megatron_ext.train.trainer import Trainer
    from megatron_ext.verify.module_outputs import LOSS, named_modules
    from megatron_ext.verify.recorded_training import build

    run = build(flags, NONE)
    # The last norm's output has the factor of the logits, which are measured themselves.
    left_out = (LOSS, "decoder.final_layernorm")
    modules = {name: module for name, module in named_modules(run.chunks) if name not in left_out}
    modules[LOGITS] = unwrapped(run.chunks)[-1].output_layer
    seen: dict[str, list[float]] = {}

    def note(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        seen[name].append(float(tensor.detach()[..., : run.config.data.vocab_size].abs().mean()))

    for name, module in modules.items():
        module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
    trainer, sizes = Trainer(run, []), {name: [] for name in modules}
    for _ in range(steps):
        seen |= {name: [] for name in modules}
        trainer.step()
        for name, values in seen.items():
            sizes[name].append(sum(values) / len(values))
    return sizes
