"""The common base of the tokenizers that run on the library `tokenizers`.

GPT-2's byte-level BPE is read from its two files: vocab.json (token -> id) and merges.txt (one merge a line).
"""

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.tokenizer_protocol import END_OF_TEXT, Text, as_string
from megatron_ext.untrusted.text import ExcessiveError
from megatron_ext.untrusted.text import read_file as bounded_file

LARGEST = 1 << 28
"""Largest size in bytes of a tokenizer's file; one of 250,000 tokens has some 30 million."""


_MOST_HOLES = 1 << 18  # next to twice the entries; some vocabularies keep a few thousand ids free


class LibraryTokenizer:
    """A tokenizer that is a `tokenizers.Tokenizer`; a subclass loads it and names the token that ends a document.

    Args:
        model: the loaded tokenizer, which this takes over.
        end_of_document: the text of the token that ends a document.
        special_tokens: --tokenizer-special-tokens, appended to the vocabulary where it lacks them.
    """

    def __init__(self, model: Tokenizer, end_of_document: str, special_tokens: Iterable[str] = ()):
        # Batches of one text: a pool of threads would not help, and does not survive a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        model.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special_tokens])
        self._tokenizer = model
        self.end_of_document = end_of_document
        self.vocab_size: int = model.get_vocab_size(with_added_tokens=True)
        eod = model.token_to_id(end_of_document)
        assert eod is not None, end_of_document
        self.eod: int = eod

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no end of document."""
        # This one leaves out the offsets of the tokens in the text: 1.2 times as fast as encode().
        return self._tokenizer.encode_batch_fast([text])[0].ids

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text that holds its special tokens already, and begin and end of each in characters."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def decode_plain(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def to_json(self) -> str:
        """Return tokenizer.json with the tokens that only tokenizer_config.json or the flags know."""
        return self._tokenizer.to_str()

    def added_tokens(self) -> list[str]:
        """Return the tokens that are found in a text before it is split, in the order of their ids."""
        return [token.content for _, token in sorted(self._tokenizer.get_added_tokens_decoder().items())]

    def finds_in_normalized(self) -> bool:
        """Return whether a token is found in the normalized text, and not in the text itself."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return self._tokenizer.normalizer is not None and any(token.normalized for token in added)

    def normalized(self, text: Text) -> str:
        """Return the text as the tokenizer's normalizer changes it."""
        return self._tokenizer.normalizer.normalize_str(as_string(text))

    @functools.cached_property
    def _splits_between_words(self) -> bool:
        split = self._tokenizer.pre_tokenizer
        added = self._tokenizer.get_added_tokens_decoder().values()
        return (
            self._tokenizer.normalizer is None
            and isinstance(self._tokenizer.model, models.BPE)
            and isinstance(split, pre_tokenizers.ByteLevel)
            and split.use_regex
            and not split.add_prefix_space
            and self.frame() == ([], [])
            and not any(token.lstrip or token.rstrip or " " in token.content for token in added)
        )

    def splits_between_words(self) -> bool:
        """Return whether a text that is cut between two ASCII words, before the space, has the ids of its pieces, one
        after another.

        This holds for GPT-2's byte-level BPE: no normalizer, its own pattern, nothing added around a text, and no token
        that is found in a text before with a space in or around it.
        """
        return self._splits_between_words

    def frame(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer's template puts before and after each text."""
        empty = self._tokenizer.encode("").ids
        framed, bare = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
        before = next((n for n in range(len(empty) + 1) if framed[n : n + len(bare)] == bare), 0)
        return empty[:before], empty[before:]


def read_file(flag: str, path: str, tokenizer_type: str) -> bytes:
    """Return the bytes of a file that a flag names.

    Raises:
        ConfigurationError: the file is missing, larger than any, no regular file, or cannot be read.
    """
    try:
        return bounded_file(path, LARGEST)
    except ExcessiveError as error:
        raise ConfigurationError(
            f"{flag} {path} is not read for --tokenizer-type {tokenizer_type}: {error}; check the path"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"{flag} {path} cannot be read for --tokenizer-type {tokenizer_type}: {error.strerror}; check the path"
        ) from error


def check_numbers(model: Tokenizer, given: str) -> None:
    """Refuse a vocabulary whose ids are far beyond the number of its entries: the library would list every hole.

    Args:
        model: the tokenizer as it was read.
        given: the flag that names its file, and the value.

    Raises:
        ConfigurationError: the highest id is over the bound.
    """
    entries = model.get_vocab(with_added_tokens=True)
    text = max(entries, key=entries.__getitem__, default="")
    if entries and entries[text] > (most := 2 * len(entries) + _MOST_HOLES):
        raise ConfigurationError(
            f"{given}: {text[:100]!r} has the id {entries[text]}, and the vocabulary {len(entries)} entries; ids over "
            f"{most} are not read. Number the entries from 0 on"
        )


class GPT2BPETokenizer(LibraryTokenizer):
    """Encodes as Megatron's tokenizer of this name, which is transformers' GPT2Tokenizer.

    `<|endoftext|>` ends a document, and is appended to a vocabulary that lacks it; in a text it is this token.

    Raises:
        ConfigurationError: a file is missing or not of this kind.
    """

    def __init__(self, vocab_file: str, merge_file: str, special_tokens: Sequence[str] = ()):
        digest = hashlib.sha256()
        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            digest.update(hashlib.sha256(read_file(flag, path, "GPT2BPETokenizer")).digest())
        try:
            tokenizer = Tokenizer(models.BPE.from_file(vocab_file, merge_file))
        except Exception as error:  # tokenizers raises a bare Exception
            raise ConfigurationError(
                f"--vocab-file {vocab_file} and --merge-file {merge_file} are not the vocab.json and merges.txt of a "
                f"GPT-2 tokenizer: {error}; give the two files that were made together"
            ) from error
        check_numbers(tokenizer, f"--vocab-file {vocab_file}")
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(tokenizer, END_OF_TEXT, [END_OF_TEXT, *special_tokens])
        digest.update("\0".join(special_tokens).encode())
        self._digest = digest.hexdigest()

    def identity(self) -> dict[str, str | int]:
        """Return type and SHA-256 digest, which tell this tokenizer from any other."""
        return {"type": "GPT2BPETokenizer", "sha256": self._digest}
