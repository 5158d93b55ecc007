"""For whoever doubts: trains a few steps in one process and in a layout, and says whether, and where, they differ.

    megatron-ext parity -- --num-layers 4 ... --tensor-model-parallel-size 2 --sequence-parallel
    megatron-ext parity --steps 10 --world-size 8 -- <the flags of your launch>
    megatron-ext parity --script mine.py -- <its flags>

It compares the initial weights (bit for bit), the output of every module and the gradient of every parameter in the
first step, and losses and gradient norms of all steps. Where the runs differ, the first tensor that differs is named:
in forward order for outputs, in backward order for gradients. Both start from the seed, in fp32, with dropout 0, on
processes of this machine. With --script both runs have the parts of your own that the script gives to `start` or
`pretrain` (docs/extending.md), and the flags that it gives them. --html FILE draws both runs on a page. Exit codes: 0
they agree, 1 they do not, 64 the flags cannot work.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext import device
from megatron_ext.commandline import ToolParser, split_at_dashes, write_output
from megatron_ext.errors import ConfigurationError
from megatron_ext.own_code import read_script
from megatron_ext.plugins.pages import charts
from megatron_ext.plugins.prove.first_difference import Comparison, Proof, comparison, prove
from megatron_ext.terminal import say
from megatron_ext.train.extensions import NONE, Extensions, extensions_of_script


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    own, training = split_at_dashes(argv)
    parser = ToolParser("Train a few steps in one process and in a layout, and say where they part.", __doc__)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps of each run")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks; default the fewest that the layout needs")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="of outputs and gradients, relative to their norm"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda needs one GPU for every rank")
    parser.add_argument("--script", type=Path, metavar="FILE", help="a script of yours that trains with own parts")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as a page as well")
    parser.usage = "%(prog)s [options] -- <training flags>"
    options = parser.parse_args(own)
    if not training and options.script is None:
        parser.error("no training flags: give them after --")
    extensions: Extensions | Callable[[], Extensions] = NONE
    if options.script is not None:
        device.install("cpu")  # before the script imports the engine
        extensions = partial(extensions_of_script, options.script.resolve(), training)
        training, _ = read_script(options.script, training)  # here as well: the ranks hand back what it defines
    both = comparison(training, options.world_size, options.steps)
    _start_device(options.device, both.world_size)
    common: dict[str, Any] = {"steps": options.steps, "tolerance": options.tolerance, "device": options.device}
    proof = prove(training, options.world_size, extensions=extensions, **common)
    say(report(both, proof))
    if options.html is not None:
        write_output("--html", options.html, page(both, proof))
    return 0 if proof.first_difference() is None else 1


def _start_device(kind: str, ranks: int) -> None:
    """Prepare this process, which only compares: the ranks that compute are processes of their own."""
    if kind == "cuda":
        from megatron_ext.device.gpu_inventory import survey

        surveyed = survey()
        seen = len(surveyed.gpus) if surveyed is not None else 0
        if seen < ranks:
            raise ConfigurationError(
                f"--device cuda needs {ranks} GPUs for {ranks} ranks, but this machine shows {seen}; use --device cpu"
            )
    device.install("cpu")


def page(both: Comparison, proof: Proof) -> charts.Markup:
    """Return the comparison as a page: losses and gradient norms of both runs on one another, under the words."""
    pairs = (
        ("Loss", "nats per token", proof.reference.losses, proof.other.losses),
        ("Gradient norm", "before clipping", proof.reference.grad_norms, proof.other.grad_norms),
    )
    drawn = []
    for name, unit, known, other in pairs:
        one, ranks = ([(at, value) for at, value in enumerate(run, 1) if value is not None] for run in (known, other))
        series = [charts.Series(one, "one process"), charts.Series(ranks, f"{both.world_size} ranks", dotted=True)]
        drawn.append(charts.chart(name, unit, series, along="step"))
    table = charts.wide("Each step", charts.element("pre", "\n".join(_table(proof))))
    words = [line for line in report(both, proof).splitlines() if line not in _table(proof)]
    return charts.page("Parity", words, [charts.main(drawn), table], style=".wide pre { white-space: pre; }")


def report(both: Comparison, proof: Proof) -> str:
    """Return the comparison in words, with the verdict in the last line."""
    changed = "".join(f", {change}" for change in both.changed)
    lines = [f"one process against {both.world_size} ranks ({both.layout}), fp32{changed}"]
    lines += _table(proof)
    equal = sum(distance == 0.0 for distance in proof.weights.values())
    lines.append(f"initial weights  {equal} of {len(proof.weights)} equal bit for bit")
    for title, distances in (("outputs", proof.outputs), ("first gradients", proof.gradients)):
        if distances:
            worst = max(distances, key=lambda name: distances[name])
            lines.append(f"{title:<15}  {len(distances)}, the farthest {distances[worst]:.1e} of its norm: {worst}")
    difference = proof.first_difference()
    if difference is None:
        lines.append(f"verdict: they agree within {proof.tolerance:g}")
    else:
        lines.append(f"verdict: THEY PART. First, {difference.sentence} (tolerance {proof.tolerance:g})")
    return "\n".join(lines)


def _table(proof: Proof) -> list[str]:
    """Return losses and gradient norms of both runs, a line for each step."""
    lines = [f"{'step':>4}  {'loss, one process':>18}  {'loss':>18}  {'gradient norm':>18}  {'gradient norm':>18}"]
    known, other = proof.reference, proof.other
    curves = zip(known.losses, other.losses, known.grad_norms, other.grad_norms, strict=True)
    for step, numbers in enumerate(curves, start=1):
        lines.append(f"{step:4d}  " + "  ".join(f"{'none' if n is None else f'{n:.10g}':>18}" for n in numbers))
    return lines
