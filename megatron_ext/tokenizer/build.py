"""From the flags --tokenizer-type and --tokenizer-model to a tokenizer."""

from pathlib import Path

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.protocol import Tokenizer

TOKENIZER_TYPES = ("ByteTokenizer", "SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer")


def build_tokenizer(type: str | None, model: str | None = None, vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer that the flags ask for.

    Args:
        type: --tokenizer-type.
        model: --tokenizer-model, a file or (HuggingFaceTokenizer) a folder.
        vocab_size: --vocab-size; only NullTokenizer uses it.

    Raises:
        ConfigurationError: the type is unknown, or the model is missing or cannot be read.
    """
    if type == "ByteTokenizer":
        from megatron_ext.tokenizer.byte import ByteTokenizer

        return ByteTokenizer()
    if type == "NullTokenizer":
        from megatron_ext.tokenizer.null import NullTokenizer

        if vocab_size is None or vocab_size < 1:
            raise ConfigurationError("--tokenizer-type NullTokenizer needs --vocab-size, the number of token ids")
        return NullTokenizer(vocab_size)
    if type == "SentencePieceTokenizer":
        from megatron_ext.tokenizer.sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(_existing(type, model, "a SentencePiece .model file", folder=False))
    if type == "HuggingFaceTokenizer":
        from megatron_ext.tokenizer.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(_existing(type, model, "a local folder with tokenizer.json", folder=True))
    raise ConfigurationError(f"--tokenizer-type {type} is not one of {', '.join(TOKENIZER_TYPES)}")


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
