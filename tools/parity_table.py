"""Measures how far every layout is from one process: trains them all on CPU ranks and writes the table of
docs/parity.md.

    python tools/parity_table.py --write docs/parity.md                   # the whole matrix, some minutes
    python tools/parity_table.py --cases "TP2, tied" "PP4 VPP2, untied"   # two rows, to the standard output

Exit codes: 0 all agree, 1 some do not (the table says which), 64 the flags cannot work.
"""

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext import device
from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.markdown import table
from megatron_ext.verify.cases import CASES, MODELS, RECIPE, Case
from megatron_ext.verify.parity import (
    BF16_FACTOR,
    CURVE_TOLERANCE,
    FIRST_LOSS_TOLERANCE,
    GRADIENT_TOLERANCE,
    STEPS,
    Experiment,
    bf16_distance,
    compare,
)
from megatron_ext.verify.ranks import RankError

_FP32_COLUMNS = (
    "case",
    "ranks",
    "initial weights",
    "first loss",
    "worst first gradient",
    "its tensor",
    f"loss, {STEPS} steps",
    f"gradient norm, {STEPS} steps",
    "validation loss",
)
_BF16_COLUMNS = ("case", "ranks", "initial weights", "distance", "limit", "distance / one process's own")


def make_parser() -> ToolParser:
    """Return the parser of the tool's command line."""
    parser = ToolParser("Compare layouts with one process and write the table.")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="rows to make; default all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file to write; default standard output")
    return parser


def fp32_row(case: Case, experiment: Experiment) -> tuple[list[str], bool]:
    """Return one row of the first table, and whether it is within all tolerances."""
    reference, other = experiment.reference(case.model), experiment.train(case)
    found = compare(reference, other)
    worst = found.worst_gradient
    distances = (found.loss, found.grad_norm, found.validation_loss)
    cells = [
        *_identity(case, reference.weight_hash, other.weight_hash),
        _number(found.first_loss),
        _number(found.gradients[worst]),
        f"`{worst}`" if found.gradients[worst] else "",
        *map(_number, distances),
    ]
    return cells, not found.problems()


def bf16_row(case: Case, experiment: Experiment) -> tuple[list[str], bool]:
    """Return one row of the second table, and whether it is within the limit."""
    reference, other = experiment.reference(case.model, bf16=True), experiment.train(case, bf16=True)
    distance, own = bf16_distance(experiment.reference(case.model), reference, other)
    cells = [
        *_identity(case, reference.weight_hash, other.weight_hash),
        _number(distance),
        _number(BF16_FACTOR * own),
        f"{distance / own:.2f}",
    ]
    return cells, other.weight_hash == reference.weight_hash and not other.flaws and distance <= BF16_FACTOR * own


def row_or_failure(
    make_row: Callable[[Case, Experiment], tuple[list[str], bool]], case: Case, experiment: Experiment
) -> tuple[list[str], str]:
    """Return a row and what is printed of it; ranks that fail cost their own row alone."""
    try:
        cells, agrees = make_row(case, experiment)
    except RankError as error:
        print(error, file=sys.stderr, flush=True)
        return [case.name, str(case.world_size), "FAILED"], "FAILED"
    return cells, "agrees" if agrees else "BEYOND TOLERANCE"


def _identity(case: Case, expected_hash: str, weight_hash: str) -> list[str]:
    equal = f"equal ({weight_hash[:8]})" if weight_hash == expected_hash else "DIFFERENT"
    return [case.name, str(case.world_size), equal]


def _number(distance: float) -> str:
    return f"{distance:.1e}" if distance else "0"


def page(fp32: Sequence[Sequence[str]], bf16: Sequence[Sequence[str]]) -> str:
    """Return the Markdown file around both tables."""
    machine = (
        f"{os.cpu_count()} CPU cores ({device.current().model_name}), Python {platform.python_version()}, "
        f"torch {version('torch')}, megatron-core {version('megatron-core')}"
    )
    models = "\n".join(f"- {name}: `{flags}`" for name, flags in MODELS.items())
    return f"""# Any layout, one loss curve

Written by `python tools/parity_table.py --write docs/parity.md` on {date.today().isoformat()}.
Machine: {machine}; gloo, one thread for each rank.
`tests/parity/test_matrix.py` makes the same comparisons and fails beyond the tolerances;
`tests/parity/test_planted_faults.py` shows that known faults do not pass them.

Every row is a run of its own, from the seed alone, without a checkpoint, on one process and on the ranks of the row.
The recipe is `{RECIPE}`.

The data is a small real `.bin/.idx` corpus with `--eod-mask-loss`, whose loss masks leave every rank another number of
tokens, and an evaluation whose last global batch is a remainder. A vocabulary of 257 is padded to a multiple of
128 x TP, so that layouts have different padding and the last rank of TP4 holds nothing else. Initial weights have a
standard deviation of 0.1, for with the usual 0.02 attention is nearly uniform at this width and hides faults.
The models:

{models}

## fp32

All columns are distances from one process. Tolerances: initial weights equal bit for bit (the first digits of their
SHA-256 are shown); first loss {FIRST_LOSS_TOLERANCE:.0e} nats per token; each tensor's first gradient, before clipping,
{GRADIENT_TOLERANCE:.0e} of its norm; losses, gradient norms and validation loss {CURVE_TOLERANCE:.0e}.

{chr(10).join(table(_FP32_COLUMNS, fp32))}

## bf16

Distance: the largest over the losses of {STEPS} steps and the validation loss, from one process in bf16 or from one in
fp32, whichever is larger. Limit: {BF16_FACTOR:g} times one process's own distance between bf16 and fp32.

{chr(10).join(table(_BF16_COLUMNS, bf16))}
"""


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = make_parser()
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases or [] if name not in CASES]
    if unknown:
        parser.error(f"--cases {unknown[0]!r} is not one of: {'; '.join(CASES)}")
    device.install("cpu")
    from megatron_ext.verify.corpus import write_corpus

    tables: dict[str, list[list[str]]] = {"fp32": [], "bf16": []}
    all_agree = True
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(write_corpus(Path(folder)))
        for precision, make_row in (("fp32", fp32_row), ("bf16", bf16_row)):
            for name in options.cases or CASES:
                cells, verdict = row_or_failure(make_row, CASES[name], experiment)
                all_agree &= verdict == "agrees"
                tables[precision].append(cells if verdict == "agrees" else [f"**{cells[0]}**", *cells[1:]])
                print(f"{precision} {name}: {verdict}", file=sys.stderr, flush=True)
                if options.write is not None:  # after every row: the whole takes many minutes
                    options.write.write_text(page(tables["fp32"], tables["bf16"]))
    if options.write is None:
        print(page(tables["fp32"], tables["bf16"]))
    return 0 if all_agree else 1


if __name__ == "__main__":
    run_tool(main)
