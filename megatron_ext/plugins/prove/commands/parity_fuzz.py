"""Trains random models in random layouts, and says where one differs from one process (docs/parity_fuzz.md).

    megatron-ext parity-fuzz --seed 7 --draws 60
    megatron-ext parity-fuzz --seed 7 --begin 41 --draws 1 --ranks 2 4 8
    megatron-ext parity-fuzz --first '2 --tensor-model-parallel-size 2' -- --num-layers 4 ... --optimizer adam

A draw is a model of all kinds of parts, its data, optimizer and precision, and two layouts: the run begins in one, is
resumed in the other, and is exported at its end; one in ten is killed instead, and started again. What cannot work is
refused before it starts, counted, and drawn anew. A draw that differs is made smaller for as long as it differs, and
printed as one command. Exit codes: 0 nothing differs but by rounding, 1 something does, 64 the flags cannot work.
"""

import json
import os
import platform
import shlex
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_ext import device
from megatron_ext.commandline import ToolParser, split_at_dashes, write_output
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.draws import ONE_PROCESS, Draw, Draws, Layout, draw
from megatron_ext.terminal import say
from megatron_ext.untrusted.text import load_json, read_file

_LARGEST_RECORD = 1 << 26


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    own, model = split_at_dashes(argv)
    parser = ToolParser("Train random models in random layouts, and compare them with one process.", __doc__)
    today = int(datetime.now(UTC).strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, metavar="N", help="of all draws; default the date")
    parser.add_argument("--draws", type=int, default=60, metavar="K", help="draws to train")
    parser.add_argument("--begin", type=int, default=0, metavar="N", help="number of the first draw")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of ranks to draw from"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no draw after so many minutes")
    parser.add_argument("--as-drawn", action="store_true", help="leave draws that differ as large as they are")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="add what was found to a JSON list, after each draw"
    )
    parser.add_argument(
        "--first", metavar="'RANKS FLAGS'", help="the layout of one draw, whose model's flags follow --"
    )
    parser.add_argument(
        "--second", metavar="'RANKS FLAGS'", help="the layout in which that is resumed; default --first"
    )
    parser.add_argument("--kill", type=float, metavar="SHARE", help="kill that at this share of its steps")
    parser.usage = "%(prog)s [options] [-- <training flags>]"
    options = parser.parse_args(own)
    if (options.first is None) != (not model):
        parser.error("--first RANKS FLAGS and the model's flags, after --, belong together")
    device.install("cpu")
    with tempfile.TemporaryDirectory() as folder:
        found = _Fuzzing(Path(folder), options)
        if model:
            first = layout_of(options.first)
            second = first if options.second is None else layout_of(options.second)
            drawn = Draw((shlex.join(model),), first, second, options.kill)
            found.draws.configured(drawn.model, first)
            found.draws.configured(drawn.model, second)
            found.try_draw(None, drawn)
        else:
            found.try_all()
    return 1 if found.differences else 0


def layout_of(text: str) -> Layout:
    """Return the layout that a text of ranks and flags names.

    Raises:
        ConfigurationError: the text does not begin with a number of ranks.
    """
    ranks, _, flags = text.strip().partition(" ")
    if not ranks.isdecimal() or int(ranks) == 0:
        raise ConfigurationError(
            f"{text!r} does not begin with a number of ranks; use '2 --tensor-model-parallel-size 2'"
        )
    return Layout(int(ranks), (flags,) if flags else ())


def command(drawn: Draw) -> str:
    """Return the command that trains a draw again."""
    layouts = {"--first": drawn.first, **({"--second": drawn.second} if drawn.second != drawn.first else {})}
    words = ["megatron-ext", "parity-fuzz"]
    for flag, layout in layouts.items():
        words += [flag, " ".join([str(layout.ranks), *layout.pieces])]
    words += [] if drawn.kill is None else ["--kill", f"{drawn.kill:.3f}"]
    return shlex.join([*words, "--", *drawn.flags])


@dataclass
class _Fuzzing:
    """Trains draws and keeps what was found."""

    folder: Path
    options: Any
    ran: int = 0
    killed: int = 0
    exported: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    rounding: list[dict[str, Any]] = field(default_factory=list)
    earlier: list[Any] | None = None
    """Records of earlier runs in the file of --record, once it has been read."""

    def __post_init__(self) -> None:
        from megatron_ext.plugins.prove.parity import write_corpus
        from megatron_ext.plugins.prove.trials import Trials

        data = write_corpus(self.folder, 5)
        self.draws = Draws(self.options.seed, data, tuple(self.options.ranks))
        self.trials = Trials(self.folder, data)

    def try_all(self) -> None:
        """Train the draws that the options ask for, and report."""
        begun = time.monotonic()
        limit = float("inf") if self.options.minutes is None else 60.0 * self.options.minutes
        for number in range(self.options.begin, self.options.begin + self.options.draws):
            if time.monotonic() - begun >= limit:
                break
            self.try_draw(number, draw(self.draws, number))
            if self.options.record is not None:
                self._record(time.monotonic() - begun)
        seconds = time.monotonic() - begun
        say(
            f"{self.ran} draws of seed {self.options.seed} ran, {60.0 * self.ran / seconds:.1f} a minute: "
            f"{self.killed} killed and resumed, {self.exported} exported; {len(self.differences)} differ, "
            f"{len(self.rounding)} differ by rounding alone; {self.draws.refused.total()} were refused, most often:"
        )
        for reason, times in self.draws.refused.most_common(5):
            say(f"  {times:4d}  {reason}")

    def try_draw(self, number: int | None, drawn: Draw) -> None:
        """Train a draw, and say where it differs."""
        verdict = self.trials.verdict(drawn)
        self.ran, self.killed = self.ran + 1, self.killed + (drawn.kill is not None)
        self.exported += verdict.exported
        name = "the draw" if number is None else f"draw {number}"
        if not verdict.problems:
            say(
                f"{name}: agrees"
                if number is None
                else f"{name}: agrees, {drawn.first.ranks} and {drawn.second.ranks} ranks"
            )
            return
        kind = "differs by rounding alone, which fp64 does not have" if verdict.is_rounding else "DIFFERS"
        say("\n".join([f"{name} {kind}:", *(f"  {text}" for text in (*verdict.problems[:8], *verdict.in_fp64[:8]))]))
        if not verdict.is_rounding and number is not None and not self.options.as_drawn:
            drawn = self._smaller(drawn, verdict)
        say(f"  {command(drawn)}")
        found = {
            "draw": number,
            "problems": verdict.problems[:8],
            "in fp64": verdict.in_fp64[:8],
            "command": command(drawn),
        }
        (self.rounding if verdict.is_rounding else self.differences).append(found)

    def _smaller(self, drawn: Draw, verdict: Any) -> Draw:
        """Return the smallest draw that differs in the same way."""
        from megatron_ext.plugins.prove.smaller import smaller

        def differs(one: Draw) -> bool:
            try:
                self.draws.configured(one.model, ONE_PROCESS)
                self.draws.configured(one.model, one.first)
                self.draws.configured(one.model, one.second)
            except ConfigurationError:
                return False
            again = self.trials.verdict(one)
            return bool(again.problems) and not again.is_rounding and again.fails == verdict.fails

        return smaller(drawn, differs)

    def _record(self, seconds: float) -> None:
        """Write what was found, after what was in the file of --record: a run that is stopped keeps its draws."""
        path = self.options.record
        earlier = self.earlier
        if earlier is None:
            earlier = load_json(read_file(path, most=_LARGEST_RECORD)) if path.exists() else []
            self.earlier = earlier
        runs = [
            *earlier,
            {
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}",
                "seed": self.options.seed,
                "draws": [self.options.begin, self.options.begin + self.ran],
                "ranks": self.options.ranks,
                "ran": self.ran,
                "killed and resumed": self.killed,
                "exported": self.exported,
                "seconds": round(seconds),
                "differences": self.differences,
                "rounding": self.rounding,
                "refused": dict(self.draws.refused.most_common()),
            },
        ]
        write_output("--record", path, json.dumps(runs, indent=1) + "\n")
