"""Trains a tokenizer: byte-level BPE as GPT-2 has it, or a SentencePiece model."""

import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

from megatron_ext.durable import replacing
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.tokenizer_protocol import END_OF_TEXT

TRAINABLE_TYPES = ("hf-bpe", "sentencepiece-bpe", "sentencepiece-unigram")


def sample_texts(texts: Iterable[str], share: float) -> Iterator[str]:
    """Yield about `share` of the texts, chosen by a hash of each: the same ones in every run, whatever their order."""
    return (text for text in texts if zlib.crc32(text.encode("utf-8", "replace")) < share * 2**32)


def train_bytelevel_bpe(texts: Iterable[str], vocab_size: int, folder: Path, *, or_fewer: bool = False) -> None:
    """Train GPT-2's kind of tokenizer: BPE over bytes, so that nothing is ever unknown.

    Writes tokenizer.json and tokenizer_config.json, which HuggingFaceTokenizer and transformers read. Id 0 is
    `<|endoftext|>`, which ends a document.

    Raises:
        ConfigurationError: the vocabulary size is below 257 (256 bytes and the special token), or the text is too
            little for it, unless fewer entries will do (`or_fewer`).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise ConfigurationError(f"--vocab-size {vocab_size} must be over {len(alphabet)}: every byte has an entry")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, normalized=False, special=True)],
        initial_alphabet=alphabet,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    entries = tokenizer.get_vocab_size()
    if entries < vocab_size and not or_fewer:
        raise ConfigurationError(f"--vocab-size {vocab_size}: the text has merges for {entries} entries; use {entries}")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "tokenizer.json") as file:
        file.write(tokenizer.to_str(pretty=True).encode())
    settings = {
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "model_max_length": 10**30,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    with replacing(folder / "tokenizer_config.json") as file:
        file.write(json.dumps(settings, indent=2).encode() + b"\n")


def train_sentencepiece(texts: Iterable[str], vocab_size: int, folder: Path, model_type: str) -> None:
    """Train a SentencePiece model, `model_type` "bpe" or "unigram", and write tokenizer.model.

    Text goes in as it is (no normalization, spaces kept); text without a piece is encoded as bytes.

    Raises:
        ConfigurationError: SentencePiece refuses, mostly for a vocabulary that the text is too small for.
    """
    import sentencepiece

    model = BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.splitlines() if line),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            num_threads=1,  # unigram training sums in the order of its threads
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigurationError(f"--vocab-size {vocab_size} --type sentencepiece-{model_type}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "tokenizer.model") as file:
        file.write(model.getvalue())
