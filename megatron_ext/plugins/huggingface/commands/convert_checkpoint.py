"""Convert between our checkpoints and those of others, on one CPU process, a block of a file at a time.

    megatron-ext convert to-hf --load checkpoints --save model-hf --dtype bf16
    megatron-ext convert from-hf --load Llama-3.2-1B --save checkpoints
    megatron-ext convert from-deepspeed --load global_step95000 --save checkpoints

to-hf takes the latest checkpoint of a --save folder (or the one that --load names itself), chooses the family that the
model is shape-equal to, and at the end compares logits with transformers. from-hf writes a checkpoint of iteration 0
that training begins from with --load; docs/huggingface.md has more. from-deepspeed does the same with what
Megatron-DeepSpeed and GPT-NeoX save, and of ZeRO's shards keeps Adam's state (docs/checkpoints.md).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.commandline import ToolParser
from megatron_ext.config.parse.settings import Settings, words_of
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.forkserver.ranks import RankError
from megatron_ext.plugins.huggingface.importers import importers
from megatron_ext.registry import load, with_own
from megatron_ext.terminal import say

if TYPE_CHECKING:
    from megatron_ext.plugins.huggingface.exporter import Exported
    from megatron_ext.plugins.huggingface.saved_model import SavedModel

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    _converted(argv)
    return 0


def convert(direction: str, settings: Settings = None, /, *, families: Sequence[Any] = (), **flags: Any) -> Path:
    """Convert between checkpoints and folders of others, in this process, and return the folder that was written.

        convert("to-hf", load="run", save="model-hf", dtype="bf16")
        convert("from-hf", load="Llama-3.2-1B", save="begin")

    Settings are the flags of `megatron-ext convert` without their hyphens. It prints what it has written and compared.

    Args:
        direction: "to-hf", "from-hf", or another direction that `megatron-ext convert --help` lists.
        settings: a dict of settings by the flags' names, or flags as on a command line.
        families: families of Hugging Face models beyond the program's, as `pretrain` takes them.
        flags: settings as keywords, which win over `settings`.
    Raises:
        ConfigurationError: the settings cannot work, or no family of Hugging Face computes as the model does.
        DataError: what was written computes otherwise than the checkpoint.
    """
    with with_own("families", families):
        return _converted([direction.replace("_", "-"), *words_of(settings, flags, _parser().knows, ["families"])])


def _parser() -> ToolParser:
    parser = ToolParser("Convert between our checkpoints and those of others.", __doc__, command="convert")
    parser.add_argument("direction", choices=("to-hf", *importers()), help="what to write")
    parser.add_argument("--load", required=True, metavar="DIR", help="our checkpoints, or another's folder")
    parser.add_argument("--save", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights of to-hf; default the checkpoint's")
    parser.add_argument(
        "--ema", action="store_true", help="to-hf of the averages that --ema-decay, or the optimizer itself, keeps"
    )
    parser.add_argument(
        "--into", metavar="FOLDER", help="to-hf: write a copy of this model whose text model is the checkpoint's"
    )
    parser.add_argument("--max-shard-size", default="5GB", help="largest file of to-hf, in bytes, KB, MB or GB")
    parser.add_argument("--no-verify", action="store_true", help="do not compare logits with transformers after to-hf")
    parser.add_argument("--check-loss", metavar="PREFIX", help="compare losses with transformers on a .bin/.idx pair")
    parser.add_argument("--check-samples", type=int, default=64, help="stretches of it to read, as long as training's")
    parser.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out of what to-hf writes")
    parser.add_argument(
        "--skip-tokenizer-check",
        action="store_true",
        help="do not compare the ids of to-hf's tokenizer with training's",
    )
    return parser


def _converted(argv: list[str]) -> Path:
    """Convert as a command line says, and return the folder that was written."""
    options = _parser().parse_args(argv)
    if options.check_samples < 1:
        raise ConfigurationError(f"--check-samples {options.check_samples} must be positive; leave it out for 64")
    started = time.perf_counter()
    if options.direction != "to-hf":
        path = load(importers()[options.direction].read)(options.load, options.save)
        say(f"wrote {path} in {time.perf_counter() - started:.1f} s; begin with --load {options.save}")
        return Path(options.save)
    size = _bytes(options.max_shard_size)
    from megatron_ext.plugins.huggingface.saved_model import SavedModel

    source = SavedModel(options.load, averages=options.ema)
    if options.into is not None:
        from megatron_ext.plugins.huggingface.exported_into import export_into
        from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder

        if options.dtype is not None:
            raise ConfigurationError(
                f"--dtype {options.dtype}: --into keeps the dtypes of its folder; leave --dtype out"
            )
        exported = export_into(source, options.save, options.into)
        dtype = HFFolder(options.save).dtype()
        _tell(exported, source, started, left_out=options.no_tokenizer)
    else:
        dtype = DTYPES[options.dtype] if options.dtype else _dtype(source, options.ema)
        exported = to_huggingface(
            source,
            options.save,
            dtype=dtype,
            max_shard_size=size,
            with_tokenizer=not options.no_tokenizer,
            checks_tokenizer=not options.skip_tokenizer_check,
        )
    if not options.no_verify:
        _verify(source, exported.path, dtype)
    if options.check_loss is not None:
        _check_loss(source, exported.path, dtype, options.check_loss, options.check_samples)
    return exported.path


def to_huggingface(
    source: "SavedModel",
    folder: str,
    *,
    dtype: str | None = None,
    max_shard_size: int = 5 * 10**9,
    with_tokenizer: bool = True,
    checks_tokenizer: bool = True,
) -> "Exported":
    """Export a checkpoint to a folder and tell of it: see `exporter.export_huggingface`."""
    from megatron_ext.plugins.huggingface.exporter import export_huggingface

    started = time.perf_counter()
    exported = export_huggingface(
        source,
        folder,
        dtype=dtype,
        max_shard_size=max_shard_size,
        with_tokenizer=with_tokenizer,
        check_tokenizer=_check_tokenizer if checks_tokenizer else None,
    )
    _tell(exported, source, started, left_out=not with_tokenizer)
    return exported


def _tell(exported: "Exported", source: "SavedModel", started: float, *, left_out: bool) -> None:
    say(
        f"wrote {exported.path}: {exported.family.architecture}, {exported.size / 1e9:.3f} GB in {exported.files} "
        f"file(s), {time.perf_counter() - started:.1f} s"
    )
    if not exported.tokenizer:
        say(_why_no_tokenizer(source.config.data.tokenizer_type, left_out))


def _dtype(source, averages: bool) -> str:
    """Return the dtype of the weights, also where their averages are written."""
    from megatron_ext.plugins.huggingface.saved_model import SavedModel

    return SavedModel(source.path).dtype() if averages else source.dtype()


def _why_no_tokenizer(kind: str | None, left_out: bool) -> str:
    if left_out:
        return "no tokenizer was written, as --no-tokenizer asks for"
    if kind == "NullTokenizer":
        return "no tokenizer was written: NullTokenizer has no text; give the model token ids"
    return "no tokenizer files were at hand; add them to the folder yourself"


def _check_tokenizer(folder: Path, config, tokenizer) -> None:
    from megatron_ext.plugins.huggingface.exported_tokenizer import check_ids

    same = check_ids(folder, config, tokenizer)
    say(
        f"tokenizer: the ids of training on {same.probes} probe texts and {same.documents} documents, read by "
        f"{' and '.join(same.by)}"
    )
    if same.note is not None:
        say(f"tokenizer: no validation data was compared: {same.note}")
    if "transformers" not in same.by:
        say("tokenizer: transformers is not installed, and did not read it")


def _verify(source, path: Path, dtype) -> None:
    from megatron_ext.plugins.huggingface.exported_model import compare_logits

    try:
        agreement = compare_logits(source, path, dtype)
    except RankError as error:
        if "does not recognize this architecture" not in str(error):
            raise
        raise ConfigurationError(
            f"{path} is written, and the transformers that is installed has no model of its model_type to compare it "
            "with; give --no-verify"
        ) from None
    summary = (
        f"largest difference of logits to transformers: {agreement.largest_difference:.2e} over {agreement.tokens} "
        f"tokens (largest logit {agreement.largest_logit:.2f})"
    )
    _conclude(agreement, summary, path)


def _check_loss(source, path: Path, dtype, prefix: str, samples: int) -> None:
    from megatron_ext.plugins.huggingface.exported_model import compare_losses

    agreement = compare_losses(source, path, dtype, prefix, samples)
    summary = (
        f"loss over {agreement.tokens:,} tokens of {prefix}: ours {agreement.ours:.7f}, transformers "
        f"{agreement.theirs:.7f} (relative difference {agreement.relative_difference:.1e})"
    )
    _conclude(agreement, summary, path)


def _conclude(agreement, summary: str, path: Path) -> None:
    if agreement.earliest_of_equals:
        summary += "; of keys with equal scores of an indexer both took the earliest, where transformers takes any"
    if not agreement.holds:
        raise DataError(f"{summary}: more than rounding. Do not use {path}, and please report this")
    say(summary)


def _bytes(text: str) -> int:
    number = text.rstrip("KMGB")
    unit = text.removeprefix(number)
    if not number.isdecimal() or unit not in _UNITS or int(number) == 0:
        raise ConfigurationError(f"--max-shard-size {text} is not a size; write for example 5GB")
    return int(number) * _UNITS[unit]
