"""GPT-2's byte-level BPE is read from its two files: vocab.json (token -> id) and merges.txt (one merge a line)."""

import hashlib
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.library import LibraryTokenizer, read_file

END_OF_TEXT = "<|endoftext|>"


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
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(tokenizer, END_OF_TEXT, [END_OF_TEXT, *special_tokens])
        digest.update("\0".join(special_tokens).encode())
        self._digest = digest.hexdigest()

    def identity(self) -> dict[str, str | int]:
        """Return what tells this tokenizer from any other."""
        return {"type": "GPT2BPETokenizer", "sha256": self._digest}
