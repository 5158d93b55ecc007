"""A Hugging Face tokenizer folder (tokenizer.json and tokenizer_config.json), read with `tokenizers` alone.

transformers' AutoTokenizer gives the same ids but imports torch, takes seconds, and can run code that a folder names
(`auto_map`). Here the folder is data: two JSON files.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.library import LARGEST, LibraryTokenizer
from megatron_ext.untrusted.text import ExcessiveError, load_json, read_file

# The order in which transformers appends those that the vocabulary lacks: it decides their ids.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HuggingFaceTokenizer(LibraryTokenizer):
    """Encodes as `AutoTokenizer(text).input_ids`; `eos_token` (else `sep_token`) ends a document.

    Args:
        folder: --tokenizer-model.
        special_tokens: --tokenizer-special-tokens, appended where the vocabulary lacks them.

    Raises:
        ConfigurationError: a file is missing or unreadable, or the folder names no token that ends a document.
    """

    def __init__(self, folder: str, special_tokens: Sequence[str] = ()):
        self.folder = folder
        """Folder that it was read from."""
        model_file = Path(folder) / "tokenizer.json"
        model = self._read(model_file)
        config_file = Path(folder) / "tokenizer_config.json"
        config = self._read(config_file) if config_file.exists() else b"{}"
        try:
            tokenizer = Tokenizer.from_buffer(model)
            settings = load_json(config)
            _add_missing_tokens(tokenizer, settings)
        except Exception as error:  # tokenizers raises a bare Exception
            raise ConfigurationError(
                f"--tokenizer-model {folder} does not hold a readable tokenizer.json and tokenizer_config.json: {error}"
            ) from error
        # Saved truncation and padding are for inference: AutoTokenizer's plain call ignores them too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Special tokens in a text are then no more than their characters, as in SentencePiece.
        tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
        super().__init__(tokenizer, self._end_of_document(tokenizer, settings), special_tokens)
        added = b"".join(b"\0" + text.encode() for text in special_tokens)
        self._digest = hashlib.sha256(model + b"\0" + config + added).hexdigest()
        self.settings: dict[str, Any] = settings
        """Content of tokenizer_config.json."""
        begin = content_of(settings.get("bos_token"))
        self.bos: int | None = None if begin is None else tokenizer.token_to_id(begin)
        """Id of the token that begins a text; None where the folder names none."""

    def identity(self) -> dict[str, str | int]:
        """Return what tells this tokenizer from any other."""
        return {"type": "HuggingFaceTokenizer", "sha256": self._digest}

    def _read(self, file: Path) -> bytes:
        try:
            return read_file(file, LARGEST)
        except ExcessiveError as error:
            raise ConfigurationError(
                f"--tokenizer-model {self.folder} is not read: {file}: {error}; give a folder as transformers saves it"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"--tokenizer-model {self.folder} cannot be used with --tokenizer-type HuggingFaceTokenizer: "
                f"{file}: {error.strerror}. Give a local folder that holds tokenizer.json"
            ) from error

    def _end_of_document(self, tokenizer: Tokenizer, settings: dict[str, Any]) -> str:
        token = content_of(settings.get("eos_token")) or content_of(settings.get("sep_token"))
        if token is None or tokenizer.token_to_id(token) is None:
            raise ConfigurationError(
                f"--tokenizer-model {self.folder} names no token that ends a document: "
                'set "eos_token" in its tokenizer_config.json'
            )
        return token


def _add_missing_tokens(tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json knows, as transformers does on loading."""
    added = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    for token in [fields for _, fields in added] + [settings.get(name) for name in _SPECIAL_TOKENS]:
        content = content_of(token)
        if content is None or tokenizer.token_to_id(content) is not None:
            continue
        flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
        special = not isinstance(token, dict) or token.get("special", True)
        tokenizer.add_tokens([AddedToken(content, special=special, **flags)])


def content_of(token: Any) -> str | None:
    """Return the text of a token, which the files give as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
