"""A Hugging Face tokenizer folder (tokenizer.json and tokenizer_config.json), read with `tokenizers` alone.

transformers' AutoTokenizer gives the same ids but imports torch, takes seconds, and can run code that a folder names
(`auto_map`). Here the folder is data: two JSON files.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.library import LARGEST, LibraryTokenizer, check_numbers
from megatron_ext.tokenizer.special_tokens import SpecialTokens
from megatron_ext.untrusted.text import ExcessiveError, load_json, read_file

_SETTINGS = "tokenizer_config.json"
_OLDER = ("special_tokens_map.json", "added_tokens.json")  # read where the former has no added_tokens_decoder


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
        model = self._read("tokenizer.json")
        config = self._read(_SETTINGS) if (Path(folder) / _SETTINGS).exists() else b"{}"
        older = dict.fromkeys(_OLDER, b"{}")
        try:
            tokenizer = Tokenizer.from_buffer(model)
            check_numbers(tokenizer, f"--tokenizer-model {folder}")
            settings = _object(config)
            if "added_tokens_decoder" not in settings:
                older |= {name: self._read(name) for name in _OLDER if (Path(folder) / name).exists()}
            known = tokenizer.get_added_tokens_decoder()
            special = SpecialTokens(settings, known, *map(_object, older.values()))
            tokenizer.add_tokens(special.missing(known))
        except ConfigurationError:
            raise
        except Exception as error:  # tokenizers raises a bare Exception
            raise ConfigurationError(
                f"--tokenizer-model {folder} does not hold a readable tokenizer.json and {_SETTINGS} (and where it "
                f"has them, {' and '.join(_OLDER)}): {error}; save it again with transformers"
            ) from error
        # Saved truncation and padding are for inference: AutoTokenizer's plain call ignores them too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Special tokens in a text are then no more than their characters, as in SentencePiece.
        tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
        super().__init__(tokenizer, self._end_of_document(tokenizer, special), special_tokens)
        added = b"".join(b"\0" + text.encode() for text in special_tokens)
        read = b"".join(b"\0" + content for content in older.values() if content != b"{}")
        self._digest = hashlib.sha256(model + b"\0" + config + read + added).hexdigest()
        self.settings: dict[str, Any] = settings
        """Content of tokenizer_config.json."""
        self.named_tokens = special.texts()
        """Texts of the tokens that have a name, such as `bos_token`."""
        begin = self.named_tokens.get("bos_token")
        self.bos: int | None = None if begin is None else tokenizer.token_to_id(begin)
        """Id of the token that begins a text; None where the folder names none."""

    def identity(self) -> dict[str, str | int]:
        """Return type and SHA-256 digest, which tell this tokenizer from any other."""
        return {"type": "HuggingFaceTokenizer", "sha256": self._digest}

    def _read(self, name: str) -> bytes:
        file = Path(self.folder) / name
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

    def _end_of_document(self, tokenizer: Tokenizer, special: SpecialTokens) -> str:
        token = special.texts().get("eos_token") or special.texts().get("sep_token")
        if token is None or tokenizer.token_to_id(token) is None:
            raise ConfigurationError(
                f"--tokenizer-model {self.folder} names no token that ends a document: "
                'set "eos_token" in its tokenizer_config.json'
            )
        return token


def _object(content: bytes) -> dict[str, Any]:
    value = load_json(content)
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.100} is no JSON object")
    return value
