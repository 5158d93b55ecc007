"""Replay a step of a run in one process, from its checkpoint and its samples.

    megatron-ext replay-step checkpoints/run 1234                # by the newest checkpoint before the step
    megatron-ext replay-step checkpoints/run 1234 --device cuda

It loads the newest checkpoint before the step (without one it begins from the seed, as the run did), takes the steps
from there, and prints loss and gradient norm next to those in metrics.jsonl. A layout gives the same numbers as one
process, so that a step that does not repeat itself was computed wrongly then: memory, a link, or a machine. Exit codes:
0 the step's numbers are those of the run, 1 they are not, or there is nothing to compare them with.
"""

import argparse
from pathlib import Path

from megatron_ext.commandline import ToolParser
from megatron_ext.terminal import say


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    options = _options(argv)
    # Torch is imported by this alone.
    from megatron_ext.plugins.prove.replay import TOLERANCE, replay

    replayed = replay(options.folder, options.step, metrics=options.metrics, device=options.device)
    usual = TOLERANCE[replayed.config.training.params_dtype]
    tolerance = usual if options.tolerance is None else options.tolerance
    say(f"one process, from iteration {replayed.begun}{''.join(f'; {note}' for note in replayed.notes)}")
    say(f"{'step':>6}  {'samples':>19}  {'loss':>14} {'recorded':>14}  {'gradient norm':>14} {'recorded':>14}")
    for step in replayed.steps:
        numbers = (step.loss, step.recorded_loss, step.grad_norm, step.recorded_grad_norm)
        shown = [f"{'-' if number is None else f'{number:.9g}':>14}" for number in numbers]
        samples = f"{step.samples.start}-{step.samples[-1]}"
        say(f"{step.iteration:6d}  {samples:>19}  {shown[0]} {shown[1]}  {shown[2]} {shown[3]}")
    last = replayed.steps[-1]
    if last.distance is None:
        say(f"verdict: no row of step {options.step} in the metrics file to compare with (--log-interval)")
        return 1
    agrees = last.distance <= tolerance
    say(
        f"verdict: step {options.step} {'is as' if agrees else 'IS NOT AS'} the run recorded it: {last.distance:.1e} "
        f"away, tolerance {tolerance:g}"
    )
    return 0 if agrees else 1


def _options(argv: list[str]) -> argparse.Namespace:
    parser = ToolParser("Replay a step of a run in one process, and compare it with what the run recorded.", __doc__)
    parser.add_argument("folder", type=Path, help="the run's --save folder")
    parser.add_argument("step", type=int, help="the iteration to replay")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="default metrics.jsonl in the folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    parser.add_argument("--tolerance", type=float, metavar="X", help="relative; default 1e-6 in fp32, 1e-2 in 16 bits")
    return parser.parse_args(argv)
