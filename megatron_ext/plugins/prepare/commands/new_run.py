"""Makes a model of one's own text: tokenizer, data, training for the time given, export, a sample and a page.

    megatron-ext new my-run --text FOLDER --minutes 30

The folder has text files or .jsonl, as `megatron-ext preprocess` reads them. The model is the largest of a few that
sees enough tokens in the time given, by steps that are measured first. They are measured again while it trains: where
the machine has become slower, the training saves, and goes on with fewer steps, over which the learning rate falls to
its end. All that is made lies in my-run: `run.yaml` has the training's flags, which
`megatron-ext pretrain --config my-run/run.yaml --load my-run/checkpoints` goes on with. Where a part has failed after
the first checkpoint, the same command goes on from the newest.
Exit codes: 0 done, 64 the flags cannot work, else that of the part that failed, which has said why.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_ext.checkpoint.native.checkpoint_folder import saved_iterations
from megatron_ext.commandline import ToolParser
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.parse.config_file import read_yaml
from megatron_ext.durable import replace_text
from megatron_ext.errors import ConfigurationError, StoppedBySignal, TrainingError
from megatron_ext.plugins.pages.loss_curve import read_history
from megatron_ext.plugins.prepare.inputs import EXTENSIONS, InputFile, find_files
from megatron_ext.resilience.signals import STOP_FILE
from megatron_ext.terminal import heading, note, say, warn
from megatron_ext.untrusted.text import load_json, read_file

_PARTS = ("tokenizer", "tokens", "size of the model", "training", "export to Hugging Face", "a sample", "the page")
_STARTS = 4  # as long as what follows takes beside steps: the training's, two of the export's, the sample's
_USUAL_START = 15.0  # seconds, where none was measured
_SHARE = 0.85  # of what is left, by the estimate; evaluations and saves are not in it
_TOKENS_PER_PARAMETER = 10  # at least; about half of what is best for the operations spent (arXiv:2203.15556)
_MOST_EPOCHS = 4  # more helps less and less (Muennighoff et al. 2023, arXiv:2305.16264)
_LAST_MADE = "report.html"
_FEWEST_STEPS, _MEASURED, _BATCH = 20, 6, 16
_MOST_MEASURING = 0.1  # of what is left for the training may go into trying another size
_EACH = 1.0  # seconds between two looks at how far the training is
_LATE = 1.15  # times what is left, as long as which the steps to go may take before they become fewer
_LOOKS_AFTER = 0.1  # of the steps, once they are done, or of the time, whichever comes first
_MOST_SHORTENINGS = 3
_OF_OPTIMIZER: dict[str, dict[str, Any]] = {
    # docs/experiments.md; four times the rate of AdamW.
    "muon": {"muon_nesterov": True, "muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2, "lr": 4.0},
}
"""Flags that go with an optimizer; `lr` is a factor of the rate."""


class Size(NamedTuple):
    """The shape of a model."""

    layers: int
    hidden: int
    heads: int
    length: int

    def parameters(self, vocabulary: int) -> int:
        """Return their number, about."""
        return 12 * self.layers * self.hidden**2 + vocabulary * self.hidden


SIZES = (Size(4, 64, 4, 64), Size(4, 128, 4, 128), Size(6, 256, 4, 256), Size(8, 512, 8, 256), Size(12, 768, 12, 512))


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Make a model of your own text.", __doc__)
    parser.add_argument("run", type=Path, metavar="FOLDER", help="folder that is made, for all that comes of it")
    parser.add_argument(
        "--text", "--input", required=True, type=Path, metavar="FOLDER", help="your files: text, .jsonl or .parquet"
    )
    parser.add_argument("--extensions", nargs="+", default=[], metavar="ENDING", help=EXTENSIONS)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="time for all of it; default 30")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--json-keys", default="text", metavar="KEY", help="key of .jsonl that holds the text")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="tokenizer's entries; default: by the text's size")
    parser.add_argument(
        "--on-error",
        choices=("fail", "skip", "log"),
        default="fail",
        help="what to do with a document that is bad",
    )
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adam", help="update rule of the training")
    parser.add_argument("--lr", type=float, metavar="RATE", help="peak learning rate; default: by size and optimizer")
    options = parser.parse_args(argv)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes} must be above 0")
    for flag, value in (("--vocab-size", options.vocab_size), ("--lr", options.lr)):
        if value is not None and value <= 0:
            parser.error(f"{flag} {value} must be above 0; leave it out, and it is chosen")
    files = find_files([str(options.text)], options.extensions)
    goes_on = options.run.exists()
    if goes_on:
        _require_unfinished(options.run, files)
    size = sum(file.size() or 0 for file in files)
    options.run.mkdir(parents=True, exist_ok=goes_on)
    inputs = [options.text, "--json-keys", options.json_keys, "--on-error", options.on_error]
    inputs += ["--extensions", *options.extensions] if options.extensions else []
    vocabulary = options.vocab_size or min(8192, max(512, 1 << (size // 400).bit_length()))
    others = ("device", "json_keys", "vocab_size", "on_error", "optimizer", "lr")
    given = {name: getattr(options, name) for name in others if getattr(options, name) != parser.get_default(name)}
    making = _Making(options, inputs, vocabulary, {f"--{name.replace('_', '-')}": one for name, one in given.items()})
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what follows is done
    try:
        return making.all_of_it(goes_on)
    except BaseException as error:
        if saved := saved_iterations(options.run / "checkpoints"):
            note(f"{options.run} has a checkpoint of iteration {saved[-1]}: the same command again goes on from it")
        else:  # nothing of worth, and it would refuse the next try
            shutil.rmtree(options.run)
            note(f"nothing had been trained: {options.run} is removed")
        if isinstance(error, KeyboardInterrupt):  # who typed Ctrl-C needs no traceback
            return 128 + signal.SIGINT
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _require_unfinished(run: Path, files: Sequence[InputFile]) -> None:
    """Require that the folder was left by a try with the same text that has saved a checkpoint."""
    if not saved_iterations(run / "checkpoints") or not (run / "run.yaml").exists() or (run / _LAST_MADE).exists():
        raise ConfigurationError(f"{run} exists; name a folder that does not, or remove it")
    then = [(file["path"], file["bytes"]) for file in _manifest(run)["inputs"]]
    if then != [(file.path, file.size()) for file in files]:
        raise ConfigurationError(
            f"{run} has an unfinished training on other text than --text: name another folder, remove it, or go on "
            f"with `megatron-ext pretrain --config {run}/run.yaml --load {run}/checkpoints --save {run}/checkpoints`"
        )


def _manifest(run: Path) -> dict[str, Any]:
    return load_json(read_file(run / "text_manifest.json", 1 << 26))


class _Making:
    def __init__(self, options: argparse.Namespace, inputs: list[object], vocabulary: int, given: dict[str, object]):
        run, self._seconds = options.run, options.minutes * 60
        self._run, self._inputs, self._vocabulary = run, inputs, vocabulary
        self._data, self._saved = run / f"text_{options.json_keys}_document", run / "checkpoints"
        self._device = [] if options.device is None else ["--device", options.device]
        self._optimizer, self._rate = options.optimizer, options.lr
        self._or_fewer = ["--or-fewer"] if options.vocab_size is None else []  # a repetitive text has few merges
        self._start, self._until = _USUAL_START, self._seconds
        self._options, self._given, self._text_is_the_limit = options, given, False
        self._begun = time.monotonic()

    def all_of_it(self, goes_on: bool) -> int:
        """Make all parts; `goes_on`: from the newest checkpoint of an earlier try, which has made the first ones."""
        run, saved = self._run, self._saved
        if goes_on:
            self._require_the_same_training()
        planned = "going on from the newest checkpoint" if goes_on else self._planned()
        self._part(3, planned)
        self._train(goes_on)
        self._part(4)
        shutil.rmtree(run / "hf", ignore_errors=True)  # of an earlier try
        self._tool("convert", "to-hf", "--load", saved, "--save", run / "hf")
        self._part(5)
        self._tool("sample", "--model", run / "hf", "--prompt", "The", "--max-new-tokens", 100)
        self._part(6)
        following = self._following()
        page = ["--html", run / _LAST_MADE, "--files", *sorted(run.iterdir()), "--next", *following]
        self._tool("show", saved, *page)
        say(f"Done in {self._elapsed():.0f} s. {run}: run.yaml, tokenizer, checkpoints, hf, report.html. Next:")
        say("\n".join(f"  {command}" for command in following))
        return 0

    def _following(self) -> list[str]:
        """Return commands to go on with: as they stand, unless more text is what is missing."""
        run, saved, options = self._run, self._saved, self._options
        steps = read_yaml(str(run / "run.yaml"))["train_iters"]
        names = ("another-run" if number == 1 else f"another-run-{number}" for number in count(1))
        other = next(name for name in names if not Path(name).exists())
        again = ["megatron-ext", "new", other, "--text", options.text, "--minutes", f"{2 * options.minutes:g}"]
        again += ["--extensions", *options.extensions] if options.extensions else []
        for flag, value in self._given.items():
            again += [flag, value]
        if self._text_is_the_limit:
            again[again.index("--text") + 1] = "MORE_TEXT"
        return [
            f"megatron-ext generate --load {saved} --prompts 'Once upon a time'",
            f"megatron-ext pretrain --config {run}/run.yaml --load {saved} --save {saved} --train-iters {2 * steps} "
            "--override-opt-param-scheduler",
            shlex.join(map(str, again)),
            f"megatron-ext compare {saved} {other}/checkpoints",
        ]

    def _require_the_same_training(self) -> None:
        """Require that an unfinished training has the optimizer and the rate of this command."""
        known = read_yaml(str(self._run / "run.yaml"))
        shape = Size(known["num_layers"], known["hidden_size"], known["num_attention_heads"], known["seq_length"])
        for name, value in self._update(shape).items():
            if known.get(name) != value:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigurationError(
                    f"{self._run} has an unfinished training with {flag} {known.get(name)}, and this command asks for "
                    f"{flag} {value}: give the command of before, name another folder, or remove it"
                )

    def _planned(self) -> str:
        """Make tokenizer and tokens, choose the model, and return the plan of the training."""
        run, tokenizer = self._run, str(self._run / "tokenizer")
        known = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
        self._part(0, f"{self._vocabulary} entries")
        entries = ["--vocab-size", self._vocabulary, *self._or_fewer]
        self._tool("train-tokenizer", "--input", *self._inputs, "--output-dir", tokenizer, *entries)
        self._part(1)
        self._tool("preprocess", "--input", *self._inputs, "--output-prefix", run / "text", "--append-eod", *known)
        tokens = Path(f"{self._data}.bin").stat().st_size // 2  # ids below 65,536 are of two bytes
        self._part(2, "a few steps of each are measured")
        if tokens < (least := 2 * SIZES[0].length):
            raise ConfigurationError(
                f"--text {self._options.text} has {tokens} tokens, and the smallest model here needs {least}: give "
                "more text"
            )
        shape, step = self._sized(tokens)
        steps = max(_FEWEST_STEPS, self._steps(shape, step, tokens))
        self._text_is_the_limit = steps < int(self._room() / step)
        if self._text_is_the_limit:
            say(
                f"  the text is the limit, and not the time: its {tokens:,} tokens are read {_MOST_EPOCHS} times, "
                "since more helps less and less; more text makes a better model"
            )
        values = self._flags(shape, steps)
        held_out = int(values["split"].split(",")[1])
        told = f"the last {held_out}% of the documents, by the files' names" if held_out else "nothing: one document"
        say(f"  kept for the validation loss: {told}")
        replace_text(run / "prompts.txt", "The\n")
        replace_text(run / "run.yaml", yaml.safe_dump(values, sort_keys=False))
        return f"{steps:,} steps, about {steps * step / 60:.1f} minutes"

    def _sized(self, tokens: int) -> tuple[Size, float]:
        """Return the largest model that sees enough tokens, and the seconds of its step."""
        chosen = None
        for shape in SIZES:
            if shape.length * _BATCH > tokens // 20 and chosen is not None:
                break  # too little text for a validation set of such samples
            if chosen is not None and self._start > _MOST_MEASURING * self._room():
                break
            begun = self._elapsed()
            step = self._step_seconds(shape)
            self._start = max(0.0, self._elapsed() - begun - _MEASURED * step)
            if chosen is None and self._room() < _FEWEST_STEPS * step:
                least = self._elapsed() + _STARTS * self._start + _FEWEST_STEPS * step / _SHARE
                warn(
                    f"--minutes {self._seconds / 60:g} is too few for a training here: these are the fewest steps of "
                    f"the smallest model, and all of it takes about {least / 60:.1f} minutes"
                )
                self._until = least
            steps = self._steps(shape, step, tokens)
            seen, parameters = steps * shape.length * _BATCH, shape.parameters(self._vocabulary)
            say(f"  {shape.layers} layers of {shape.hidden}: {step:.3f} s a step, {seen:,} tokens in {steps:,} steps")
            if chosen is not None and seen < _TOKENS_PER_PARAMETER * parameters:
                break
            chosen = shape, step
        assert chosen is not None
        return chosen

    def _room(self) -> float:
        """Return the seconds that steps may take, by the estimate."""
        return max(0.0, self._seconds - self._elapsed() - _STARTS * self._start) * _SHARE

    def _steps(self, shape: Size, step: float, tokens: int) -> int:
        return min(int(self._room() / step), _MOST_EPOCHS * tokens // (shape.length * _BATCH))

    def _train(self, goes_on: bool) -> None:
        """Train; with fewer steps from where it is, where the rest would else end too late."""
        for shortened in range(_MOST_SHORTENINGS + 1):
            load = ["--load", self._saved] if goes_on or shortened else []
            words = ["pretrain", "--config", self._run / "run.yaml", *self._device, "--save", self._saved, *load]
            training = self._started(words)
            steps = self._steps_in_time(training) if shortened < _MOST_SHORTENINGS else None
            code = _ended(training, self._seconds_left()) if steps is None else None
            if code is None:
                code = self._stopped(training)
            if code:
                raise SystemExit(code)
            if steps is None:
                return
            replace_text(self._run / "run.yaml", yaml.safe_dump(self._with_steps(steps), sort_keys=False))

    def _seconds_left(self) -> float | None:
        """Return the seconds that the training may still take; None where its steps are the fewest: all of them."""
        if read_yaml(str(self._run / "run.yaml"))["train_iters"] <= _FEWEST_STEPS:
            return None
        return max(0.0, self._stops_at - self._elapsed())

    @property
    def _stops_at(self) -> float:
        """Seconds after the beginning at which the training has to end, so that the other parts end in time."""
        return self._until - (_STARTS - 1) * self._start

    def _steps_in_time(self, training: subprocess.Popen[bytes]) -> int | None:
        """Wait while the training keeps its time; return the steps that it can do in all where it does not, or None
        where it has ended, or where none of what is left is worth another start."""
        planned, begun = read_yaml(str(self._run / "run.yaml"))["train_iters"], self._elapsed()
        before = self._steps_done()  # by an earlier start
        first: tuple[int, float] | None = None
        while training.poll() is None and self._elapsed() < self._stops_at:
            if _ended(training, _EACH) is not None:
                return None
            done, now = self._steps_done(), self._elapsed()
            if done is None or done == before:
                continue
            if first is None:  # what comes before is the start, and a first step that compiles
                first = done, now
                if self._start == _USUAL_START:  # an earlier try has measured it, and nobody has written it down
                    self._start = min(_USUAL_START, now - begun)
            steps, seconds = done - first[0], now - first[1]
            enough = steps >= max(2, _LOOKS_AFTER * planned) or now - begun >= _LOOKS_AFTER * (self._stops_at - begun)
            left = self._stops_at - now
            if not enough or steps < 2 or (planned - done) * seconds / steps <= _LATE * left:
                continue
            more = int((left - self._start) * _SHARE * steps / seconds)
            if more < max(_FEWEST_STEPS, done // 10):
                return None
            warn(
                f"a step takes {seconds / steps:.3f} s by now: the training goes on with {done + more:,} steps in the "
                f"place of {planned:,}, to end in time"
            )
            return done + more
        return None

    def _steps_done(self) -> int | None:
        """Return the last logged step of this training; None before there is one."""
        with contextlib.suppress(TrainingError, OSError):
            return read_history(self._saved).steps[-1]["iteration"]
        return None

    def _with_steps(self, steps: int) -> dict[str, Any]:
        """Return the flags of the training with another number of steps."""
        known = read_yaml(str(self._run / "run.yaml"))
        # The checkpoint was saved on the way to another number.
        intervals = {name: value for name, value in _intervals(steps).items() if value < known[name]}
        return {**known, "train_iters": steps, **intervals, "override_opt_param_scheduler": True}

    def _stopped(self, training: subprocess.Popen[bytes]) -> int:
        """Ask the training to save and stop; return its exit code, 0 where it has."""
        planned = read_yaml(str(self._run / "run.yaml"))
        if (self._steps_done() or 0) + planned["log_interval"] > planned["train_iters"]:  # it evaluates, or saves
            code = _ended(training)
            assert code is not None
            return code
        if self._elapsed() >= self._stops_at:
            warn(f"training is slower than was measured: it stops here, to end after {self._until / 60:.1f} minutes")
        self._saved.mkdir(exist_ok=True)
        (self._saved / STOP_FILE).touch()
        code = _ended(training)
        (self._saved / STOP_FILE).unlink(missing_ok=True)  # where it had ended by itself
        assert code is not None
        return 0 if code == StoppedBySignal.exit_code and saved_iterations(self._saved) else code

    def _flags(self, shape: Size, steps: int) -> dict[str, Any]:
        # Documents are not divided: of a few, one is a large share, and one alone is needed for the training.
        documents = _manifest(self._run)["documents"]
        held_out = 0 if documents < 2 else max(5, -(-100 // documents))
        return {
            **_shape(shape),
            "data_path": [str(self._data)],
            "split": f"{100 - held_out},{held_out},0",
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(self._run / "tokenizer"),
            "train_iters": steps,
            **self._update(shape),
            "min_lr": 1e-4,
            "lr_decay_style": "cosine",
            "adam_beta2": 0.95,
            "eval_iters": 2 if held_out else 0,
            "sample_prompts": str(self._run / "prompts.txt"),
            **_intervals(steps),
        }

    def _update(self, shape: Size) -> dict[str, Any]:
        """Return the flags of the optimizer."""
        own = {"lr": 1.0, **_OF_OPTIMIZER.get(self._optimizer, {})}
        usual = own["lr"] * (2e-3 if shape.hidden < 256 else 1e-3)
        return {"optimizer": self._optimizer, **own, "lr": usual if self._rate is None else self._rate}

    def _step_seconds(self, shape: Size) -> float:
        """Return the seconds of the fastest of a few steps, of synthetic tokens."""
        with tempfile.TemporaryDirectory() as folder:
            file, rows = Path(folder) / "run.yaml", Path(folder) / "metrics.jsonl"
            file.write_text(
                yaml.safe_dump({**_shape(shape), **self._update(shape), "train_iters": _MEASURED}), encoding="utf-8"
            )
            synthetic = ["--mock-data", "--vocab-size", self._vocabulary, "--eval-iters", 0, "--log-interval", 1]
            flags = ["--config", file, *self._device, *synthetic, "--metrics-file", rows]
            self._tool("pretrain", *flags, quiet=True)
            return min(row["elapsed_ms"] for row in read_history(rows).steps[2:]) / 1000

    def _tool(self, *words: object, quiet: bool = False) -> None:
        """Run a command of megatron-ext; ends this process with its exit code where it fails."""
        if code := _ended(self._started(words, quiet=quiet)):
            raise SystemExit(code)

    def _started(self, words: Sequence[object], *, quiet: bool = False) -> subprocess.Popen[bytes]:
        package = Path(__file__).resolve().parents[4]
        path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_ext", *map(str, words)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL if quiet else None,
        )

    def _part(self, number: int, remark: str = "") -> None:
        left = self._seconds - self._elapsed()
        clock = f"at most {left / 60:.1f} minutes left" if left > 0 else f"{-left:.0f} s over --minutes"
        head = f"{number + 1}/{len(_PARTS)} {_PARTS[number]}{f': {remark}' if remark else ''}"
        say()
        heading(f"== [{self._elapsed():3.0f} s, {clock}] {head}")

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun


def _ended(program: subprocess.Popen[bytes], seconds: float | None = None) -> int | None:
    """Return the exit code of a program, or None where it has not ended in so many seconds; after Ctrl-C, which the
    program gets, too, once it has saved its checkpoint."""
    try:
        return program.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    except KeyboardInterrupt:
        program.wait()
        raise


def _intervals(steps: int) -> dict[str, int]:
    """Return the flags that are a share of the steps of the training."""
    each = max(1, steps // 10)
    return {
        "lr_warmup_iters": max(1, steps // 20),
        "eval_interval": each,
        "log_interval": max(1, steps // 100),
        "sample_interval": max(1, steps // 2),
        "save_interval": max(each, steps // 2),
    }


def _shape(shape: Size) -> dict[str, Any]:
    """Return the flags of a Llama-shaped model, and its batch."""
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "seq_length": shape.length,
        "position_embedding_type": "rope",
        "swiglu": True,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "micro_batch_size": _BATCH,
        "global_batch_size": _BATCH,
    }
