"""A Hugging Face tokenizer folder (tokenizer.json and tokenizer_config.json), read with `tokenizers` alone.

transformers' AutoTokenizer gives the same ids but imports torch, takes seconds, and can run code that a folder names
(`auto_map`). Here the folder is data: two JSON files.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigurationError

# The order in which transformers appends those that the vocabulary lacks: it decides their ids.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HuggingFaceTokenizer:
    """Encodes as `AutoTokenizer(text).input_ids`; `eos_token` (else `sep_token`) ends a document.

    Raises:
        ConfigurationError: a file is missing or unreadable, or the folder names no token that ends a document.
    """

    def __init__(self, folder: str):
        from tokenizers import Tokenizer

        self._folder = folder
        model_file = Path(folder) / "tokenizer.json"
        model = self._read(model_file)
        config_file = Path(folder) / "tokenizer_config.json"
        config = self._read(config_file) if config_file.exists() else b"{}"
        try:
            self._tokenizer = Tokenizer.from_buffer(model)
            settings = json.loads(config)
        except Exception as error:  # tokenizers raises a bare Exception
            raise ConfigurationError(
                f"--tokenizer-model {folder} does not hold a readable tokenizer.json and tokenizer_config.json: {error}"
            ) from error
        # Saved truncation and padding are for inference: AutoTokenizer's plain call ignores them too.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_missing_tokens(settings)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eod: int = self._end_of_document(settings)
        self._digest = hashlib.sha256(model + b"\0" + config).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """tokenizer.json with the tokens that only tokenizer_config.json knows."""
        return self._tokenizer.to_str()

    def added_tokens(self) -> list[str]:
        """The tokens that are found in a text before it is split, in the order of their ids."""
        return [token.content for _, token in sorted(self._tokenizer.get_added_tokens_decoder().items())]

    def frame(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's template puts before and after each text."""
        empty = self._tokenizer.encode("").ids
        framed, bare = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
        before = next((n for n in range(len(empty) + 1) if framed[n : n + len(bare)] == bare), 0)
        return empty[:before], empty[before:]

    def identity(self) -> dict[str, str | int]:
        return {"type": "HuggingFaceTokenizer", "sha256": self._digest}

    def _read(self, file: Path) -> bytes:
        try:
            return file.read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"--tokenizer-model {self._folder} cannot be used with --tokenizer-type HuggingFaceTokenizer: "
                f"{file}: {error.strerror}. Give a local folder that holds tokenizer.json"
            ) from error

    def _add_missing_tokens(self, settings: dict[str, Any]) -> None:
        """Add the tokens that only tokenizer_config.json knows, as transformers does on loading."""
        from tokenizers import AddedToken

        added = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
        for token in [fields for _, fields in added] + [settings.get(name) for name in _SPECIAL_TOKENS]:
            content = _content(token)
            if content is None or self._tokenizer.token_to_id(content) is not None:
                continue
            flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
            special = not isinstance(token, dict) or token.get("special", True)
            self._tokenizer.add_tokens([AddedToken(content, special=special, **flags)])

    def _end_of_document(self, settings: dict[str, Any]) -> int:
        token = _content(settings.get("eos_token")) or _content(settings.get("sep_token"))
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ConfigurationError(
                f"--tokenizer-model {self._folder} names no token that ends a document: "
                'set "eos_token" in its tokenizer_config.json'
            )
        return token_id


def _content(token: Any) -> str | None:
    """The text of a token, which the files give as a string or as an object."""
    return token.get("content") if isinstance(token, dict) else token
