"""Trains small models for the benchmarks that compare how well they learn, and keeps each run as a line of a file.

A run's cost is processor seconds of this process, one thread: other work on the machine hardly changes them. They are
those of the median step times the steps; evaluations are not counted.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.recording import heading, keep, sentence
from megatron_ext.plugins.pages.charts import COLOURS, Series, line_picture

STEP_TOKENS = 512
EVERY = 10  # steps, over which a curve's training losses are averaged
ADAMW = "--optimizer adam --adam-beta2 0.95"
WIDTHS = {"1M": 128, "4M": 256}
MODEL = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--seq-length 128 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --global-batch-size 4 "
    "--clip-grad 1 --weight-decay 0.1 --eval-iters 16 --device cpu --log-interval 1000000"
)
MLP = {"1M": 352, "4M": 896}


def model(size: str, mlp: int) -> list[str]:
    """Return the flags of a model of this size (a key of WIDTHS) and width of its MLPs, but for its layers."""
    width = WIDTHS[size]
    sizes = f"--hidden-size {width} --num-attention-heads {width // 32} --ffn-hidden-size {mlp}"
    return f"{MODEL} {sizes}".split()


def schedule(rate: float, steps: int, decay: str = "cosine") -> list[str]:
    """Return the flags of a learning rate that warms up for a twentieth of the steps, and of six evaluations."""
    end = f"--lr-decay-style cosine --min-lr {rate / 10:g}" if decay == "cosine" else "--lr-decay-style constant"
    return f"--lr {rate:g} {end} --lr-warmup-iters {steps // 20} --eval-interval {steps // 6}".split()


def corpus(folder: Path, name: str) -> list[str]:
    """Return the flags of the data of `name` in the folder: `code`, tokens of the quickstart's tokenizer, or
    `tinyshakespeare`, bytes."""
    tokenizer = "--tokenizer-type ByteTokenizer"
    if name == "code":
        tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder / 'tokenizer'}"
    data = (f"--{part}-data-path {folder / f'{name}_{part}'}_text_document" for part in ("train", "valid"))
    return f"{' '.join(data)} {tokenizer}".split()


@dataclass(frozen=True)
class Learned:
    """How a run went."""

    losses: list[float]
    """Training loss, in nats per token: the mean of each EVERY steps. NaN, and the last, where the run broke off."""
    validation: dict[int, float]
    """Loss on held-out data, in nats per token, by the number of steps before it."""
    step_seconds: float
    """Processor seconds of a step, the median."""

    @property
    def final(self) -> float:
        """The held-out loss after the last step, infinite where the run broke off."""
        return math.inf if math.isnan(self.losses[-1]) else self.validation[max(self.validation)]


def learned(flags: Sequence[str], steps: int, seed: int) -> Learned:
    """Train with these flags in this process.

    Args:
        flags: those of pretrain_gpt.py, but for steps and seed.
    """
    from megatron_ext.errors import NumericError
    from megatron_ext.train.pretrain import pretrain

    seconds: list[float] = []
    words = [*flags, "--train-iters", str(steps), "--seed", str(seed)]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            trained = pretrain(words, callbacks=[lambda: _clock(seconds)])
        except NumericError:
            return Learned([math.nan], {}, statistics.median(seconds))
    losses = [statistics.fmean(trained.losses[at : at + EVERY]) for at in range(0, steps, EVERY)]
    return Learned(losses, dict(trained.validation_losses), statistics.median(seconds))


def _clock(seconds: list[float]) -> Any:
    """Return a callback that appends the processor seconds of each step, whose training ends where callbacks that
    evaluate have not begun."""
    from megatron_ext.train.trainer import Callback

    class Clock(Callback):
        began = 0.0

        def on_step_begin(self, trainer: Any) -> None:
            self.began = time.process_time()

        def on_step_end(self, trainer: Any, result: Any) -> None:
            seconds.append(time.process_time() - self.began)

    return Clock()


class Runs:
    """The runs of a file with a JSON object a line, of which none is trained twice."""

    def __init__(self, file: Path):
        self.file = file
        self._done: dict[str, Learned] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(line)
            validation = {int(step): loss for step, loss in row["validation"].items()}
            self._done[row["key"]] = Learned(row["losses"], validation, row["step_seconds"])

    def run(self, flags: Sequence[str], steps: int, seed: int) -> Learned:
        """Return the run of these flags, trained now unless the file has it."""
        key = f"{' '.join(flags)} --train-iters {steps} --seed {seed}"
        if key not in self._done:
            self._done[key] = found = learned(flags, steps, seed)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as rows:
                rows.write(json.dumps({"key": key, **asdict(found)}) + "\n")
            print(f"{found.losses[-1]:.4f} nats, {found.step_seconds:.4f} s a step: {key}", flush=True)
        return self._done[key]


def best_rate(loss: Callable[[float], float], begin: float) -> dict[float, float]:
    """Return the losses of the learning rates that were tried, each twice another, until the best lies between two.

    Args:
        loss: returns the loss of a rate.
        begin: the first rate.
    """
    found = {begin: loss(begin)}
    while True:
        best = best_of(found)
        new = [rate for rate in (best / 2, best * 2) if rate not in found]
        if not new:
            return found
        found[new[0]] = loss(new[0])


@dataclass(frozen=True)
class Compared:
    """One of what a comparison compares, in one size and on one corpus."""

    name: str
    parameters: int
    rate: float
    seeds: Sequence[Learned]

    @property
    def losses(self) -> list[float]:
        """The last held-out loss of each seed."""
        return [run.final for run in self.seeds]

    @property
    def step_seconds(self) -> float:
        """The least of the seeds': other work only adds to it."""
        return min(run.step_seconds for run in self.seeds)

    def curve(self) -> list[tuple[int, float]]:
        """Return the held-out loss by step, the mean of the seeds, from a quarter of the run on."""
        steps = sorted(set.intersection(*(set(run.validation) for run in self.seeds)))
        means = [(step, statistics.fmean(run.validation[step] for run in self.seeds)) for step in steps]
        return [(step, loss) for step, loss in means if 4 * step >= steps[-1]]


@dataclass(frozen=True)
class Comparison:
    """What a comparison found on one corpus."""

    tried: dict[str, dict[float, float]]
    """Held-out loss of the first seed at the smallest size, by name and learning rate."""
    sizes: dict[str, list[Compared]]


Flags = Mapping[str, Callable[[str, float], list[str]]]
"""By the name of what is compared, what returns the flags of a size and learning rate."""


def tuned(given: argparse.Namespace, flags: Flags, begin: Mapping[str, float]) -> dict[str, dict[float, float]]:
    """Return by name the held-out losses of the rates that were tried, by one seed at the smallest size.

    Args:
        begin: by name, the rate to begin with.
    """
    runs, small = Runs(given.data / "runs.jsonl"), next(iter(WIDTHS))
    return {
        name: best_rate(lambda rate, of=flags[name]: runs.run(of(small, rate), given.steps, 1).final, rate)
        for name, rate in begin.items()
    }


def compare(given: argparse.Namespace, flags: Flags, rates: Mapping[str, float]) -> dict[str, list[Compared]]:
    """Return by size what its seeds learned at these learning rates."""
    runs, sizes = Runs(given.data / "runs.jsonl"), {}
    for size, seeds in zip(WIDTHS, given.seeds, strict=False):
        if not seeds:
            continue
        found: dict[str, list[Learned]] = {name: [] for name in flags}
        for seed in range(1, seeds + 1):  # outside, so that a stop leaves all with the same number
            for name, of in flags.items():
                found[name].append(runs.run(of(size, rates[name]), given.steps, seed))
        sizes[size] = [
            Compared(name, parameters(of(size, rates[name])), rates[name], found[name]) for name, of in flags.items()
        ]
    return sizes


def best_of(tried: Mapping[float, float]) -> float:
    """Return the rate with the least loss."""
    return min(tried, key=tried.__getitem__)


def arguments(text: str | None, corpora: Sequence[str] = ("code",)) -> argparse.Namespace:
    """Return the options of a comparison.

    Args:
        text: the script's own.
        corpora: those to choose among.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that learning_data.sh made; runs are kept there"
    )
    parser.add_argument("--corpora", nargs="+", default=corpora, choices=corpora)
    parser.add_argument("--steps", type=int, default=300, help="of 4 samples of 128 tokens")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 3], help=f"seeds of each size: {', '.join(WIDTHS)}")
    parser.add_argument("--output", type=Path, help="folder for the .json, the .md and the pictures of this run")
    return parser.parse_args()


def parameters(flags: Sequence[str]) -> int:
    """Return the number of parameters of the model of these flags."""
    from megatron_ext.parts.catalogue import count
    from megatron_ext.train.configure import configure

    return count(configure([*flags, "--train-iters", "1000000"]).config)


def table(rows: Sequence[Compared], steps: int) -> list[str]:
    """Return a table: the last held-out losses, and what the run cost, next to the first row's."""
    text = [
        "| | parameters | learning rate | held-out loss, mean | of each seed | CPU s | CPU s to the first row's loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        until = _steps_until(row.curve(), statistics.fmean(rows[0].losses))
        text.append(
            f"| {row.name} | {row.parameters:,} | {row.rate:g} | {statistics.fmean(row.losses):.4f} | "
            f"{', '.join(f'{loss:.4f}' for loss in row.losses)} | {steps * row.step_seconds:.0f} | "
            f"{'not reached' if until is None else f'{until * row.step_seconds:.0f}'} |"
        )
    return text


def _steps_until(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Return the steps after which the curve falls to a loss, between its points on a line; None where it does not."""
    for (before, above), (after, below) in itertools.pairwise(curve):
        if below <= loss <= above:
            return after - (after - before) * (loss - below) / ((above - below) or 1.0)
    return None


def pictures(title: str, rows: Sequence[Compared]) -> dict[str, str]:
    """Return SVG files, by what stands along them: held-out losses by tokens and by processor seconds."""
    styles = [f".run{n} {{ stroke: {each}; color: {each}; }}\n" for n, each in enumerate(COLOURS[: len(rows)])]
    drawn = {}
    for name, along in (("tokens", "tokens"), ("seconds", "CPU ms")):
        lines = []
        for n, row in enumerate(rows):
            scale = STEP_TOKENS if name == "tokens" else 1000 * row.step_seconds
            lines.append(Series([(round(step * scale), loss) for step, loss in row.curve()], row.name, style=f"run{n}"))
        style = "".join([*styles, ".key { stroke: none; }\n"])
        drawn[name] = line_picture(title, "nats per token", lines, along=along, style=style)
    return drawn


def write(given: argparse.Namespace, name: str, found: Mapping[str, Comparison]) -> None:
    """Print what was found by corpus as a page, and keep it where --output says so."""
    record: dict[str, Any] = heading()
    record |= {"steps": given.steps, "found": {data: asdict(each) for data, each in found.items()}}
    text = [
        f"# {name.replace('_', ' ').capitalize()}, {record['date']}",
        "",
        f"{sentence(record)} `python benchmarks/{name}.py`: {given.steps} steps of {STEP_TOKENS} tokens, held-out loss "
        "in nats per token (per byte with tinyshakespeare). CPU seconds are those of the process, one thread, "
        "without evaluations.",
    ]
    drawn = {}
    for data, each in found.items():
        text += [
            "",
            f"## {data}: learning rates at the small size, one seed",
            "",
            "| | held-out loss by rate |",
            "|---|---|",
        ]
        for row, losses in each.tried.items():
            text.append(f"| {row} | {', '.join(f'{rate:g}: {losses[rate]:.4f}' for rate in sorted(losses))} |")
        for size, rows in each.sizes.items():
            text += ["", f"## {data}, {size}", "", *table(rows, given.steps)]
            for along, svg in pictures(f"Held-out loss, {data}, {size}", rows).items():
                file = f"{name}-{data}-{size}-{along}.svg"
                drawn[file] = svg
                text += ["", f"![Held-out loss by {along}]({file})"]
    page = "\n".join(text) + "\n"
    print(page)
    if given.output is not None:
        keep(given.output, name, record, page)
        for file, svg in drawn.items():
            (given.output / file).write_text(svg)
