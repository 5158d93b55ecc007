"""A tiktoken vocabulary in the JSON file that Megatron and NeMo write: a list of rank, token_bytes and token_str.

    [{"rank": 0, "token_bytes": "AA==", "token_str": "\\u0000"}, ...]

token_bytes is base64; the first 256 are the bytes. Ids 0 to N-1 are special tokens (N =
--tiktoken-num-special-tokens): those named, then <SPECIAL_7>, <SPECIAL_8> and so on. The token of rank r has id N + r,
and the file is cut so that the last id is --vocab-size - 1.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.library import read_file
from megatron_ext.untrusted.text import load_json

DEFAULT_VOCAB_SIZE = 1 << 17
DEFAULT_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
# How a text is split before the merges: Megatron's two patterns, of which a vocabulary was trained with one. The second
# tells upper from lower case. (They are data of the format: another pattern gives other ids.)
PATTERNS = {
    "v1": "|".join(
        (
            r"[^\r\n\p{L}\p{N}]?+\p{L}+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"\s*[\r\n]",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
    "v2": "|".join(
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}


class TikTokenizer:
    """Encodes as Megatron's tokenizer of this name; `</s>` ends a document, special tokens count in a text.

    As in Megatron, a lone surrogate becomes U+FFFD.

    Args:
        model_file: --tokenizer-model.
        vocab_size: --vocab-size, special tokens included.
        pattern: --tiktoken-pattern, v1 or v2.
        num_special_tokens: --tiktoken-num-special-tokens.
        special_tokens: --tokenizer-special-tokens; must hold the seven default ones.

    Raises:
        ConfigurationError: tiktoken is not installed, or the file and the flags do not fit each other.
    """

    def __init__(
        self,
        model_file: str,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        pattern: str = "v2",
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] = DEFAULT_SPECIAL_TOKENS,
    ):
        try:
            import tiktoken
        except ImportError as error:
            raise ConfigurationError(
                "--tokenizer-type TikTokenizer needs the package tiktoken: pip install tiktoken"
            ) from error
        special = _all_special_tokens(special_tokens, num_special_tokens)
        if num_special_tokens >= vocab_size:
            raise ConfigurationError(
                f"--vocab-size {vocab_size} leaves no room behind --tiktoken-num-special-tokens {num_special_tokens}; "
                f"use the number of all ids, for example --vocab-size {DEFAULT_VOCAB_SIZE}"
            )
        content = read_file("--tokenizer-model", model_file, "TikTokenizer")
        tokens = _read_tokens(model_file, content)
        if len(tokens) < vocab_size - num_special_tokens:
            raise ConfigurationError(
                f"--tokenizer-model {model_file} has {len(tokens)} tokens, and with --tiktoken-num-special-tokens "
                f"{num_special_tokens} that is less than --vocab-size {vocab_size}; use --vocab-size "
                f"{len(tokens) + num_special_tokens}"
            )
        self.vocab_size = vocab_size
        self.eod = special.index("</s>")
        self.pattern = pattern
        self.special_tokens = {text: number for number, text in enumerate(special)}
        self.ranks = {
            token: number + num_special_tokens for number, token in enumerate(tokens[: vocab_size - num_special_tokens])
        }
        self._encoding = tiktoken.Encoding(
            name=model_file,
            pat_str=PATTERNS[pattern],
            mergeable_ranks=self.ranks,
            special_tokens=self.special_tokens,
        )
        self._special = set(special)
        settings = json.dumps([vocab_size, pattern, special])
        self._digest = hashlib.sha256(content + b"\0" + settings.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no end of document."""
        return self._encoding.encode(text, allowed_special=self._special, disallowed_special=())

    def encode_to_array(self, text: str) -> np.ndarray:
        """Encode as `encode` does, without a list of Python's integers."""
        try:
            return self._encoding.encode_to_numpy(text, allowed_special=self._special, disallowed_special=())
        except UnicodeEncodeError:  # encode() has an answer to a lone surrogate
            return np.asarray(self.encode(text), np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self._encoding.decode(list(ids))

    def splits_between_words(self) -> bool:
        """Return whether `LibraryTokenizer.splits_between_words` holds here: both patterns end at the end of a word,
        and a space may begin the next one."""
        return not any(" " in text for text in self._special)

    def identity(self) -> dict[str, str | int]:
        """Return type and SHA-256 digest, which tell this tokenizer from any other."""
        return {"type": "TikTokenizer", "sha256": self._digest}


def _all_special_tokens(named: Sequence[str], count: int) -> list[str]:
    """Return the named ones and as many numbered ones as are missing to `count`."""
    missing = [text for text in DEFAULT_SPECIAL_TOKENS if text not in named]
    if missing:
        raise ConfigurationError(
            f"--tokenizer-special-tokens lacks {' '.join(missing)}, which TikTokenizer needs; give "
            f"{' '.join([*named, *missing])}"
        )
    if len(named) > count:
        raise ConfigurationError(
            f"--tiktoken-num-special-tokens {count} is less than the {len(named)} special tokens; use {len(named)} or "
            "the number that the vocabulary was used with before"
        )
    special = [*named, *(f"<SPECIAL_{number}>" for number in range(len(named), count))]
    doubled = sorted({text for text in special if special.count(text) > 1}) if len(set(special)) < len(special) else []
    if doubled:
        raise ConfigurationError(f"--tokenizer-special-tokens: {' '.join(doubled)} is there twice; leave one out")
    return special


def _read_tokens(model_file: str, content: bytes) -> list[bytes]:
    """Return the bytes of every token, in the order of their ranks."""
    try:
        entries = load_json(content)
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        wrong = next((n for n, entry in enumerate(entries) if entry["rank"] != n), None)
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise ConfigurationError(
            f"--tokenizer-model {model_file} is not a tiktoken vocabulary in JSON, a list of objects with rank and "
            f"token_bytes ({error!r}); give that file, or another --tokenizer-type"
        ) from error
    if wrong is None:
        wrong = next((n for n in range(256) if tokens[n : n + 1] != [bytes([n])]), None)
    if wrong is not None or len(set(tokens)) < len(tokens):
        problem = f"entry {wrong} is out of place" if wrong is not None else "a token is there twice"
        raise ConfigurationError(
            f"--tokenizer-model {model_file}: {problem}; the ranks must count from 0, the first 256 be the bytes, and "
            "every token be there once"
        )
    return tokens
