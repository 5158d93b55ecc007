"""A SentencePiece model is turned into a pipeline of the library `tokenizers`, which gives the same ids.

    text -> charsmap -> extra spaces -> dummy prefix -> "▁" for " " -> BPE or unigram over the whole text

SentencePiece scores pieces where `tokenizers` ranks merges, and finds only ordinary pieces in a text, where
`tokenizers` finds every entry. This file makes up for both. Two differences remain, which the check of an export finds
where they matter: the library applies a charsmap (nmt_nfkc and the like) to whole grapheme clusters, and it adds the
scores of a unigram model in 64 bits, SentencePiece in 32.

Reads a SentencePiece model file (unigram or BPE).
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.library import read_file
from megatron_ext.tokenizer.tokenizer_protocol import Text

_SPACE = "▁"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
_FOUND = (_NORMAL, _USER_DEFINED, _UNUSED)
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType


def merges(pieces: Iterable[str], ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the merges by which pieces arise: every pair of entries of `ids` that makes one, the first piece's first.

    A vocabulary without merges (of SentencePiece, of tiktoken) joins any neighbours that make an entry, the one of the
    highest priority first.
    """
    for piece in pieces:
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        yield from sorted(
            (pair for pair in pairs if pair[0] in ids and pair[1] in ids), key=lambda pair: (ids[pair[0]], ids[pair[1]])
        )


def from_sentencepiece(model: bytes) -> Tokenizer:
    """Build the pipeline from the bytes of a .model file.

    Control pieces and the unknown piece become special tokens. SentencePiece never finds those in a text: a caller sets
    `encode_special_tokens`, as transformers does for `split_special_tokens`.

    Raises:
        ConfigurationError: the package protobuf is missing, or the model has a feature that the library lacks.
    """
    proto = _parse(model)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    _refuse(proto)
    kinds = [piece.type for piece in proto.pieces]
    pieces = [piece.piece for piece in proto.pieces]
    symbols = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _USER_DEFINED]
    build = _bpe if trainer.model_type == _BPE else _unigram
    tokenizer = Tokenizer(build(proto, pieces, kinds))
    tokenizer.normalizer = normalizers.Sequence(list(_normalizers(normalizer)))
    splits = list(_splits(proto, symbols))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.Sequence(list(_decoders(normalizer)))
    special = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    return tokenizer


def _parse(model: bytes) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ConfigurationError(
            "reading the entries of a SentencePiece model needs the package protobuf: pip install protobuf"
        ) from error
    messages: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    return messages.ModelProto.FromString(model)


def _refuse(proto: Any) -> None:
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    problem = None
    if trainer.model_type not in (_UNIGRAM, _BPE):
        problem = "is neither unigram nor BPE"
    elif trainer.treat_whitespace_as_suffix:
        problem = "was trained with treat_whitespace_as_suffix"
    elif not normalizer.escape_whitespaces:
        problem = "was trained without escape_whitespaces"
    if problem:
        raise ConfigurationError(f"the SentencePiece model {problem}, which tokenizer.json cannot express")


def _normalizers(spec: Any) -> Iterator[normalizers.Normalizer]:
    if spec.precompiled_charsmap:
        yield normalizers.Precompiled(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield normalizers.Replace(
            Regex(rf"\A +|[ {_SPACE}]+\z"), ""
        )  # at the end, SentencePiece has escaped them by then
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if spec.add_dummy_prefix:
        yield normalizers.Prepend(_SPACE)
    yield normalizers.Replace(" ", _SPACE)


def _decoders(spec: Any) -> Iterator[decoders.Decoder]:
    yield decoders.Replace(_SPACE, " ")
    yield decoders.ByteFallback()
    yield decoders.Fuse()
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        yield decoders.Strip(" ", 1, 0)


def user_defined_symbols(model: bytes) -> list[str]:
    """Return the pieces of a .model file that are found in a text as a whole."""
    return [piece.piece for piece in _parse(model).pieces if piece.type == _USER_DEFINED]


def special_pieces(model: bytes) -> tuple[list[str], bool]:
    """Return the entries of a .model file that are no ordinary pieces (control, unknown, user-defined, unused, bytes),
    and whether some of them are found in a text.

    Raises:
        ConfigurationError: the package protobuf is missing.
    """
    special = [piece for piece in _parse(model).pieces if piece.type != _NORMAL]
    return [piece.piece for piece in special], any(piece.type in _FOUND for piece in special)


def _splits(proto: Any, symbols: list[str]) -> Iterator[pre_tokenizers.PreTokenizer]:
    if proto.trainer_spec.model_type == _BPE and symbols:
        # The longest symbol first, as SentencePiece takes it.
        ordered = sorted(symbols, key=len, reverse=True)
        yield pre_tokenizers.Split(Regex("|".join(map(re.escape, ordered))), "isolated")
    if proto.trainer_spec.model_type == _UNIGRAM or symbols:
        cuts = list(_cuts(proto))
        if cuts:
            yield pre_tokenizers.Split(Regex("|".join(cuts)), "merged_with_previous")


def _cuts(proto: Any) -> Iterator[str]:
    """Return patterns that cut the name of a control piece or a byte, such as "</s>", at a place that no ordinary piece
    spans.

    The library then cannot take the name for an entry, and the ordinary pieces are found as before.
    """
    ordinary = (piece.piece for piece in proto.pieces if piece.type in _FOUND)
    spanned = {pair for piece in ordinary for pair in itertools.pairwise(piece)}
    for name in (piece.piece for piece in proto.pieces if piece.type not in _FOUND):
        places = (at for at, pair in enumerate(itertools.pairwise(name), 1) if pair not in spanned)
        if (at := next(places, None)) is not None:
            yield f"{re.escape(name[:at])}(?={re.escape(name[at:])})"


def _bpe(proto: Any, pieces: list[str], kinds: list[int]) -> models.BPE:
    ids = {piece: number for number, piece in enumerate(pieces)}
    vocabulary = {piece: ids[piece] for piece, kind in zip(pieces, kinds, strict=True) if kind in (_NORMAL, _UNUSED)}
    by_priority = sorted((number for number in vocabulary.values()), key=lambda number: -proto.pieces[number].score)
    return models.BPE(
        vocab=ids,
        merges=list(merges((pieces[number] for number in by_priority), vocabulary)),
        unk_token=proto.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        # A user-defined symbol is split off before, and has no merges.
        ignore_merges=_USER_DEFINED in kinds,
    )


def _unigram(proto: Any, pieces: list[str], kinds: list[int]) -> models.Unigram:
    """Return the unigram model, with scores as in SentencePiece's unigram_model.cc; pieces that are never found in a
    text get a score that never wins."""
    normal = [piece.score for piece in proto.pieces if piece.type == _NORMAL]
    never = min(normal) - 1000.0  # only unknown characters are worse, and no path can avoid those
    highest = max(normal)
    scores = {
        _NORMAL: lambda piece: piece.score,
        _USER_DEFINED: lambda piece: len(piece.piece.encode()) * highest - 0.1,
    }
    entries = [
        (piece, scores[kind](proto.pieces[number]) if kind in scores else never)
        for number, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
    ]
    return models.Unigram(entries, proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback)


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

    def normalized(self, text: Text) -> bytes:
        """Return the text in which pieces are found, in UTF-8: normalized, and with "▁" for a space."""
        return self._processor.normalize(text if isinstance(text, bytes) else text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self._processor.decode_ids(list(ids))

    def piece(self, id: int) -> str:
        """Return the text of an entry, such as "</s>" or "▁the"."""
        return self._processor.id_to_piece(id)

    def identity(self) -> dict[str, str | int]:
        """Return type and SHA-256 digest, which tell this tokenizer from any other."""
        return {"type": "SentencePieceTokenizer", "sha256": self._digest}
