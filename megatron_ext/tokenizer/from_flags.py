"""Builds a tokenizer from the flags --tokenizer-type, --tokenizer-model and the like."""

from collections.abc import Sequence
from pathlib import Path

from megatron_ext.config.schema import DataConfig
from megatron_ext.config.schema.data_flags import TOKENIZER_TYPES
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer


def tokenizer_from_flags(flags: DataConfig) -> Tokenizer:
    """Build the tokenizer that the flags ask for. Raises as `build_tokenizer` does."""
    return build_tokenizer(
        flags.tokenizer_type,
        flags.tokenizer_model,
        flags.vocab_size,
        vocab_file=flags.vocab_file,
        merge_file=flags.merge_file,
        special_tokens=flags.tokenizer_special_tokens,
        tiktoken_pattern=flags.tiktoken_pattern,
        tiktoken_num_special_tokens=flags.tiktoken_num_special_tokens,
    )


def build_tokenizer(
    type: str | None,
    model: str | None = None,
    vocab_size: int | None = None,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    special_tokens: Sequence[str] | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = 1000,
) -> Tokenizer:
    """Build a tokenizer.

    Args:
        type: --tokenizer-type.
        model: --tokenizer-model, a file or (HuggingFaceTokenizer) a folder.
        vocab_size: --vocab-size; only NullTokenizer and TikTokenizer use it.
        vocab_file, merge_file: --vocab-file and --merge-file, of GPT2BPETokenizer.
        special_tokens: --tokenizer-special-tokens, of HuggingFaceTokenizer, GPT2BPETokenizer and TikTokenizer.
        tiktoken_pattern, tiktoken_num_special_tokens: of TikTokenizer.

    Raises:
        ConfigurationError: the type is unknown, a file is missing or cannot be read, or a flag belongs to another type.
    """
    if type not in TOKENIZER_TYPES:
        raise ConfigurationError(f"--tokenizer-type {type} is not one of {', '.join(TOKENIZER_TYPES)}")
    _refuse_flags_of_others(
        type,
        {
            "--vocab-file": vocab_file,
            "--merge-file": merge_file,
            "--tokenizer-special-tokens": special_tokens,
            "--tiktoken-pattern": tiktoken_pattern,
        },
    )
    if type == "ByteTokenizer":
        from megatron_ext.tokenizer.simple import ByteTokenizer

        return ByteTokenizer()
    if type == "NullTokenizer":
        from megatron_ext.tokenizer.simple import NullTokenizer

        if vocab_size is None or vocab_size < 1:
            raise ConfigurationError("--tokenizer-type NullTokenizer needs --vocab-size, the number of token ids")
        return NullTokenizer(vocab_size)
    if type == "SentencePieceTokenizer":
        from megatron_ext.tokenizer.from_sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(_existing(type, model, "a SentencePiece .model file", folder=False))
    if type == "HuggingFaceTokenizer":
        from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer

        folder = _existing(type, model, "a local folder with tokenizer.json", folder=True)
        return HuggingFaceTokenizer(folder, special_tokens or ())
    if type == "GPT2BPETokenizer":
        from megatron_ext.tokenizer.library import GPT2BPETokenizer

        if vocab_file is None or merge_file is None:
            raise ConfigurationError(
                "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file: give vocab.json and merges.txt"
            )
        return GPT2BPETokenizer(vocab_file, merge_file, special_tokens or ())
    from megatron_ext.tokenizer.tiktoken import DEFAULT_SPECIAL_TOKENS, DEFAULT_VOCAB_SIZE, TikTokenizer

    return TikTokenizer(
        _existing(type, model, "a tiktoken vocabulary in JSON", folder=False),
        vocab_size or DEFAULT_VOCAB_SIZE,
        tiktoken_pattern or "v2",
        tiktoken_num_special_tokens,
        special_tokens or DEFAULT_SPECIAL_TOKENS,
    )


# Flags that only some tokenizers read; without an effect they would be a mistake.
_READ_BY = {
    "--vocab-file": ("GPT2BPETokenizer",),
    "--merge-file": ("GPT2BPETokenizer",),
    "--tokenizer-special-tokens": ("HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer"),
    "--tiktoken-pattern": ("TikTokenizer",),
}


def _refuse_flags_of_others(type: str, values: dict[str, str | Sequence[str] | None]) -> None:
    for flag, value in values.items():
        readers = _READ_BY[flag]
        if value is not None and type not in readers:
            shown = value if isinstance(value, str) else " ".join(value)
            raise ConfigurationError(
                f"{flag} {shown} is not read by --tokenizer-type {type}, only by {' and '.join(readers)}; leave {flag} "
                "out, or choose that type"
            )


def _existing(type: str, model: str | None, wanted: str, *, folder: bool) -> str:
    if model is None:
        raise ConfigurationError(f"--tokenizer-type {type} needs --tokenizer-model, {wanted}")
    path = Path(model)
    if not path.exists():
        raise ConfigurationError(f"--tokenizer-model {model} does not exist; --tokenizer-type {type} needs {wanted}")
    if path.is_dir() != folder:
        kind = "a folder" if path.is_dir() else "a file"
        raise ConfigurationError(f"--tokenizer-model {model} is {kind}; --tokenizer-type {type} needs {wanted}")
    return model
