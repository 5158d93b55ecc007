"""Checks that activations keep their size as a model gets wider: what --use-mup is for.

    megatron-ext coordinate-check -- --num-layers 2 --seq-length 64 ... --lr 0.01 --use-mup --mup-base-hidden-size 64
    megatron-ext coordinate-check --widths 64 128 256 512 --head-size 16 --steps 6 --html page.html -- <flags>

It trains a few steps at each width (--hidden-size and --num-attention-heads are its own) in one process, and prints for
each module by which power of the width the mean absolute value of its output grows: about 0 or below where a learning
rate transfers, up to 1 where it does not. --html draws them. Exit codes: 0 nothing grows, 1 something does, 64 the
flags cannot work.

Source: Yang et al. 2022 (arXiv:2203.03466), appendix D.1: in a parametrization whose hyperparameters transfer, no
activation grows with the width after some updates.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext import device
from megatron_ext.commandline import ToolParser, split_at_dashes, write_output
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.pages import charts
from megatron_ext.terminal import say, tracked

Sizes = dict[str, list[float]]
"""Mean absolute value of the output in each step, by module, in the order of a forward pass."""

LOGITS = "output_layer"


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    own, training = split_at_dashes(argv)
    parser = ToolParser("Check that activations keep their size as a model gets wider.", __doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256], metavar="N", help="hidden sizes")
    parser.add_argument("--head-size", type=int, default=16, metavar="N", help="size of a head in each")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="updates before the last measurement")
    parser.add_argument("--most", type=float, default=0.2, metavar="POWER", help="the largest growth that passes")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw the sizes on a page")
    parser.usage = "%(prog)s [options] -- <training flags>"
    options = parser.parse_args(own)
    widths = sorted(set(options.widths))
    if not training or len(widths) < 2 or options.steps < 1:
        parser.error("give training flags after --, at least two --widths, and --steps from 1 on")
    if any(width < 1 or width % max(options.head_size, 1) for width in widths) or options.head_size < 1:
        parser.error(f"--widths must be multiples of --head-size {options.head_size}")
    device.install("cpu")
    by_width = {}
    for width in tracked("training widths", widths):
        size = ["--hidden-size", str(width), "--num-attention-heads", str(width // options.head_size)]
        by_width[width] = activation_sizes([*training, *size], options.steps + 1)
    powers = growth(by_width)
    say("\n".join(_report(by_width, powers)))
    worst = max(powers, key=lambda name: powers[name])
    grows = powers[worst] > options.most
    what = "grows the most" if grows else f"grows with a power of at most {options.most:g}"
    say(f"verdict: {f'{worst} {what}' if grows else f'nothing {what}'}")
    if options.html is not None:
        write_output("--html", options.html, str(_page(by_width, powers, training)))
    return 1 if grows else 0


def _report(by_width: Mapping[int, Sizes], powers: Mapping[str, float]) -> list[str]:
    """Return a line for each module: its size at each width after the last update, and the power."""
    lines = ["mean |activation|".ljust(52) + "".join(f"{width:>10}" for width in by_width) + "     power"]
    for name, power in powers.items():
        sizes = "".join(f"{sizes[name][-1]:>10.4g}" for sizes in by_width.values())
        lines.append(f"{name:<52}{sizes}{power:>10.2f}")
    return lines


def _page(by_width: Mapping[int, Sizes], powers: Mapping[str, float], training: list[str]) -> charts.Markup:
    """Return a chart for each module, with a line for the first step and one for the last."""
    drawn = []
    for name, power in powers.items():
        steps = {"first step": 0, "last step": -1}
        series = [
            charts.Series([(w, sizes[name][step]) for w, sizes in by_width.items()], title, dotted=step != 0)
            for title, step in steps.items()
        ]
        unit = f"mean absolute value, power {power:.2f}"
        drawn.append(charts.chart(name, unit, series, along="width", doublings=True))
    return charts.page("Coordinate check", [" ".join(training)], charts.main(drawn))


def activation_sizes(flags: Sequence[str], steps: int) -> Sizes:
    """Train `steps` steps by flags of `megatron-ext pretrain` in one process, and return the sizes of activations."""
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
    from megatron_ext.plugins.prove.gather import LOSS, named_modules
    from megatron_ext.plugins.prove.recorded_training import build
    from megatron_ext.train.extensions import NONE
    from megatron_ext.train.trainer import Trainer

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
