"""Reads a SentencePiece model file (unigram or BPE)."""

import hashlib
from collections.abc import Sequence

import numpy as np

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.library import read_file


class SentencePieceTokenizer:
    """Encodes as Megatron's tokenizer of this name does; the model's </s> ends a document.

    Raises:
        ConfigurationError: the file is no SentencePiece model, or it has no end-of-sentence piece.
    """

    def __init__(self, model_file: str):
        import sentencepiece

        model = read_file("--tokenizer-model", model_file, "SentencePieceTokenizer")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ConfigurationError(
                f"--tokenizer-model {model_file} is not a SentencePiece model ({len(model)} bytes): give the .model "
                "file that SentencePiece training wrote, or another --tokenizer-type"
            ) from error
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise ConfigurationError(
                f"--tokenizer-model {model_file} has no end-of-sentence piece to end a document with: "
                "train it with eos_id >= 0 (the default of SentencePiece)"
            )
        self.unknown: int = self._processor.unk_id()
        self.model = model  # the file's bytes
        self._digest = hashlib.sha256(model).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no end of document."""
        try:
            return self._processor.encode_as_ids(text)
        except RuntimeError:
            text.encode("utf-8")  # a lone surrogate: UnicodeEncodeError, as the protocol says
            raise

    def encode_to_array(self, text: str) -> np.ndarray:
        """Encode as `encode` does, without a list of Python's integers, which takes as long as the encoding."""
        try:
            return self._processor.encode_as_numpy(text)
        except (AttributeError, RuntimeError):  # an older sentencepiece, or a lone surrogate
            return np.asarray(self.encode(text), np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self._processor.decode_ids(list(ids))

    def piece(self, id: int) -> str:
        """Return the text of an entry, such as "</s>" or "▁the"."""
        return self._processor.id_to_piece(id)

    def identity(self) -> dict[str, str | int]:
        """Return what tells this tokenizer from any other."""
        return {"type": "SentencePieceTokenizer", "sha256": self._digest}
