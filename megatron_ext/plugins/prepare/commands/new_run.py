"""Makes a model of one's own text: tokenizer, data, training for the time given, export, a sample and a page.

    megatron-ext new my-run --text FOLDER --minutes 30

The folder has text files or .jsonl, as `megatron-ext preprocess` reads them. The model is the largest of a few that
sees enough tokens in the time given, by steps that are measured first. All that is made lies in my-run: `run.yaml` has
the training's flags, which `megatron-ext pretrain --config my-run/run.yaml --load my-run/checkpoints` goes on with.
Exit codes: 0 done, 64 the flags cannot work, else that of the part that failed, which has said why.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_ext.commandline import ToolParser
from megatron_ext.durable import replace_text
from megatron_ext.plugins.pages.loss_curve import read_history
from megatron_ext.plugins.prepare.inputs import EXTENSIONS, find_files
from megatron_ext.terminal import say, warn
from megatron_ext.untrusted.text import load_json, read_file

_PARTS = ("tokenizer", "tokens", "size of the model", "training", "export to Hugging Face", "a sample", "the page")
_STARTS = 4  # as long as the programs that follow take to start: training, export, sample and page
_SHARE = 0.85  # of what is left, by the estimate; evaluations and saves are not in it
_TOKENS_PER_PARAMETER = 10  # at least; about half of what is best for the operations spent (arXiv:2203.15556)
_MOST_EPOCHS = 4  # more helps less and less (Muennighoff et al. 2023, arXiv:2305.16264)
_FEWEST_STEPS, _MEASURED, _BATCH = 20, 6, 16
_MOST_MEASURING = 0.1  # of what is left for the training may go into trying another size


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
        "--text", "--input", required=True, type=Path, metavar="FOLDER", help="your files: text, or .jsonl"
    )
    parser.add_argument("--extensions", nargs="+", default=[], metavar="ENDING", help=EXTENSIONS)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="time for all of it; default 30")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--json-keys", default="text", metavar="KEY", help="key of .jsonl that holds the text")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="tokenizer's entries; default: by the text's size")
    options = parser.parse_args(argv)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes} must be above 0")
    if options.run.exists():
        parser.error(f"{options.run} exists; name a folder that does not, or remove it")
    size = sum(file.size() or 0 for file in find_files([str(options.text)], options.extensions))
    options.run.mkdir(parents=True)
    inputs = [options.text, "--json-keys", options.json_keys]
    inputs += ["--extensions", *options.extensions] if options.extensions else []
    vocabulary = options.vocab_size or min(8192, max(512, 1 << (size // 400).bit_length()))
    try:
        data = options.run / f"text_{options.json_keys}_document"
        return _Making(options.run, inputs, data, options.minutes * 60, options.device, vocabulary).all_of_it()
    except BaseException:
        if not (options.run / "checkpoints").exists():  # nothing of worth, and it would refuse the next try
            shutil.rmtree(options.run)
        raise


class _Making:
    def __init__(
        self, run: Path, inputs: list[object], data: Path, seconds: float, device: str | None, vocabulary: int
    ):
        self._run, self._inputs, self._data, self._seconds = run, inputs, data, seconds
        self._device = [] if device is None else ["--device", device]
        self._vocabulary = vocabulary
        self._documents = 0
        self._begun = time.monotonic()

    def all_of_it(self) -> int:
        run, tokenizer = self._run, str(self._run / "tokenizer")
        known = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
        self._part(0, f"{self._vocabulary} entries")
        self._tool(
            "train-tokenizer", "--input", *self._inputs, "--output-dir", tokenizer, "--vocab-size", self._vocabulary
        )
        self._part(1)
        self._tool("preprocess", "--input", *self._inputs, "--output-prefix", run / "text", "--append-eod", *known)
        tokens = Path(f"{self._data}.bin").stat().st_size // 2  # ids below 65,536 are of two bytes
        self._documents = load_json(read_file(run / "text_manifest.json", 1 << 20))["documents"]
        self._part(2, "a few steps of each are measured")
        values, seconds = self._sized(tokens)
        replace_text(run / "run.yaml", yaml.safe_dump(values, sort_keys=False))
        replace_text(run / "prompts.txt", "The\n")
        self._part(3, f"{values['train_iters']:,} steps, about {seconds / 60:.1f} minutes")
        saved = run / "checkpoints"
        self._tool("pretrain", "--config", run / "run.yaml", *self._device, "--save", saved)
        self._part(4)
        self._tool("convert", "to-hf", "--load", saved, "--save", run / "hf")
        self._part(5)
        self._tool("sample", "--model", run / "hf", "--prompt", "The", "--max-new-tokens", 100)
        self._part(6)
        self._tool("show", saved, "--html", run / "report.html", "--files", *sorted(run.iterdir()))
        say(f"Done in {self._elapsed():.0f} s. {run}: run.yaml, tokenizer, checkpoints, hf, report.html. Next:")
        say(f"  megatron-ext generate --load {saved} --prompts 'Once upon a time'")
        return 0

    def _sized(self, tokens: int) -> tuple[dict[str, Any], float]:
        """Return the flags of the largest model that sees enough tokens, and the seconds of its training."""
        chosen, start, room = None, 0.0, 0.0
        for shape in SIZES:
            if shape.length * _BATCH > tokens // 20 and chosen is not None:
                break  # too little text for a validation set of such samples
            if chosen is not None and start > _MOST_MEASURING * room:
                break
            begun = self._elapsed()
            step = self._step_seconds(shape)
            start = max(0.0, self._elapsed() - begun - _MEASURED * step)
            room = max(0.0, self._seconds - self._elapsed() - _STARTS * start) * _SHARE
            if chosen is None and room < _FEWEST_STEPS * step:
                least = self._elapsed() + _STARTS * start + _FEWEST_STEPS * step / _SHARE
                warn(
                    f"--minutes {self._seconds / 60:g} is too few for a training here: these are the fewest steps of "
                    f"the smallest model, and all of it takes about {least / 60:.1f} minutes"
                )
            steps = min(int(room / step), _MOST_EPOCHS * tokens // (shape.length * _BATCH))
            seen, parameters = steps * shape.length * _BATCH, shape.parameters(self._vocabulary)
            say(f"  {shape.layers} layers of {shape.hidden}: {step:.3f} s a step, {seen:,} tokens in {steps:,} steps")
            if chosen is not None and seen < _TOKENS_PER_PARAMETER * parameters:
                break
            steps = max(_FEWEST_STEPS, steps)
            chosen = (self._flags(shape, steps), steps * step)
        assert chosen is not None
        return chosen

    def _flags(self, shape: Size, steps: int) -> dict[str, Any]:
        # Documents are not divided: of a few, one is a large share, and one alone is needed for the training.
        each, held_out = max(1, steps // 10), 0 if self._documents < 2 else max(5, -(-100 // self._documents))
        return {
            **_shape(shape),
            "data_path": [str(self._data)],
            "split": f"{100 - held_out},{held_out},0",
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(self._run / "tokenizer"),
            "train_iters": steps,
            "lr": 2e-3 if shape.hidden < 256 else 1e-3,
            "min_lr": 1e-4,
            "lr_decay_style": "cosine",
            "lr_warmup_iters": max(1, steps // 20),
            "adam_beta2": 0.95,
            "eval_interval": each,
            "eval_iters": 2 if held_out else 0,
            "log_interval": max(1, steps // 100),
            "sample_interval": max(1, steps // 2),
            "sample_prompts": str(self._run / "prompts.txt"),
            "save_interval": max(each, steps // 2),
        }

    def _step_seconds(self, shape: Size) -> float:
        """Return the seconds of the fastest of a few steps, of synthetic tokens."""
        with tempfile.TemporaryDirectory() as folder:
            file, rows = Path(folder) / "run.yaml", Path(folder) / "metrics.jsonl"
            file.write_text(yaml.safe_dump({**_shape(shape), "lr": 1e-3, "train_iters": _MEASURED}), encoding="utf-8")
            synthetic = ["--mock-data", "--vocab-size", self._vocabulary, "--eval-iters", 0, "--log-interval", 1]
            flags = ["--config", file, *self._device, *synthetic, "--metrics-file", rows]
            self._tool("pretrain", *flags, quiet=True)
            return min(row["elapsed_ms"] for row in read_history(rows).steps[2:]) / 1000

    def _tool(self, *words: object, quiet: bool = False) -> None:
        """Run a command of megatron-ext; ends this process with its exit code where it fails."""
        package = Path(__file__).resolve().parents[4]
        path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
        ran = subprocess.run(
            [sys.executable, "-m", "megatron_ext", *map(str, words)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL if quiet else None,
            check=False,
        )
        if ran.returncode:
            raise SystemExit(ran.returncode)

    def _part(self, number: int, remark: str = "") -> None:
        left = self._seconds - self._elapsed()
        clock = f"at most {left / 60:.1f} minutes left" if left > 0 else f"{-left:.0f} s over --minutes"
        head = f"{number + 1}/{len(_PARTS)} {_PARTS[number]}{f': {remark}' if remark else ''}"
        say(f"\n== [{self._elapsed():3.0f} s, {clock}] {head}")

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun


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
