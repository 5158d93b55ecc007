"""Encodes one block of conversations to tokens and their flags: the worker's part for instruction data.

With a sequence length the conversations of a block are packed: as many whole ones into a sequence of that many tokens
as go in (first fit, the longest first), the rest of it filled up with tokens that nothing is learned from. A sequence
is then a window of training, in any order of them, and no conversation is cut. Each block is packed on its own, so that
the result depends neither on the number of workers nor on where a run was killed.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from megatron_ext.data.indexed import token_dtype
from megatron_ext.data.mask import BEGINS, COUNTS
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.prepare.chat import END_OF_TEXT, Rendered
from megatron_ext.plugins.prepare.conversations import ConversationFormat
from megatron_ext.plugins.prepare.documents import Block, RawDocument
from megatron_ext.plugins.prepare.encode import EncodedBlock, OnError
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.tokenizer.simple import ByteTokenizer
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

_Document = tuple[np.ndarray, np.ndarray]  # tokens and flags


class ConversationEncoder:
    """Parses, renders and encodes blocks.

    Args:
        tokenizer: a tokenizer that tells where its tokens lie in the text, or ByteTokenizer.
        form: how a record becomes text.
        append_eod: end every document with the end-of-document id, if it does not end with it.
        on_error: what to do with a bad document: raise DataError, or leave it out.
        packed_to: tokens of a sequence to pack into; 0 for every document as it is.
        train_on_inputs: train on all that is not the first token of a document.

    Raises:
        ConfigurationError: the tokenizer does not tell where its tokens lie.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: ConversationFormat,
        append_eod: bool,
        on_error: OnError,
        packed_to: int,
        train_on_inputs: bool,
    ):
        if not isinstance(tokenizer, (LibraryTokenizer, ByteTokenizer)):
            raise ConfigurationError(
                f"--data-format {form.name} needs --tokenizer-type HuggingFaceTokenizer, GPT2BPETokenizer or "
                f"ByteTokenizer, which tell where their tokens lie in the text; {tokenizer.identity()['type']} does "
                "not. megatron-ext convert to-hf writes any tokenizer as one of Hugging Face"
            )
        self._tokenizer = tokenizer
        self._form = form
        self._append_eod = append_eod
        self._on_error = on_error
        self._packed_to = packed_to
        self._train_on_inputs = train_on_inputs
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._filling = 1 if tokenizer.eod == 0 else 0

    def __call__(self, block: Block) -> EncodedBlock:
        documents: list[_Document] = []
        problems: list[str] = []
        for record in block.documents():
            try:
                documents.append(self._encode(record))
            except DataError as error:
                if self._on_error == "fail":
                    raise
                problems.append(str(error))
        count = len(documents)
        if self._packed_to:
            documents = self._packed(documents)
        tokens, flags = (
            np.concatenate([np.zeros(0, dtype), *(document[part] for document in documents)])
            for part, dtype in enumerate((self._dtype, np.uint8))
        )
        return EncodedBlock(
            end=block.end,
            bytes_read=block.bytes_read,
            text_bytes=block.size,
            documents=count,
            problems=problems,
            columns=[(tokens, np.array([len(one) for one, _ in documents], np.int64))],
            sample=None,
            flags=flags,
        )

    def _encode(self, record: RawDocument) -> _Document:
        rendered = self._form.render(record)
        try:
            ids, trained = self._ids(rendered)
        except UnicodeEncodeError as error:
            raise DataError(f"{record.where}: the text cannot be encoded: {error}") from error
        eod = self._tokenizer.eod
        if self._append_eod and len(ids) and ids[-1] != eod:
            ids, trained = np.append(ids, eod), np.append(trained, trained[-1])
        if self._packed_to and len(ids) > self._packed_to:
            raise DataError(
                f"{record.where}: the document has {len(ids)} tokens, more than --seq-length {self._packed_to}; give a "
                "longer one, or leave such documents out with --on-error skip"
            )
        flags = np.where(trained | self._train_on_inputs, COUNTS, 0).astype(np.uint8)
        flags[:1] = BEGINS
        return ids.astype(self._dtype), flags

    def _ids(self, rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, and for each whether it is trained on."""
        if isinstance(self._tokenizer, LibraryTokenizer):
            return _by_offsets(self._tokenizer, rendered, in_a_frame=self._form.template is None)
        return _bytes(rendered, self._tokenizer.eod)

    def _packed(self, documents: Sequence[_Document]) -> list[_Document]:
        size = self._packed_to
        whole = [document for document in documents if len(document[0])]
        sequences: list[list[int]] = []
        room: list[int] = []
        for number in sorted(range(len(whole)), key=lambda number: -len(whole[number][0])):
            length = len(whole[number][0])
            sequence = next((sequence for sequence, left in enumerate(room) if left >= length), len(room))
            if sequence == len(room):
                sequences.append([])
                room.append(size)
            sequences[sequence].append(number)
            room[sequence] -= length
        return [self._sequence([whole[n] for n in sorted(numbers)]) for numbers in sequences]

    def _sequence(self, documents: Sequence[_Document]) -> _Document:
        left = self._packed_to - sum(len(tokens) for tokens, _ in documents)
        filling = np.full(left, self._filling, self._dtype), np.zeros(left, np.uint8)
        filling[1][:1] = BEGINS
        parts = [*documents, filling]
        return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([flags for _, flags in parts])


def _by_offsets(tokenizer: LibraryTokenizer, rendered: Rendered, in_a_frame: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and whether each is trained on: it begins inside a part that is, or holds the beginning of one."""
    ids, offsets = tokenizer.encode_rendered(rendered.text)
    places = np.array(offsets, np.int64).reshape(-1, 2)
    trained = np.zeros(len(ids), bool)
    for first, end in rendered.spans:
        trained |= (places[:, 0] >= first) & (places[:, 0] < end)
        trained |= (places[:, 0] < first) & (places[:, 1] > first)
    if in_a_frame:  # what the tokenizer puts around every text, for which a template has words of its own
        before, after = tokenizer.frame()
        ids = [*before, *ids, *after]
        trained = np.concatenate([np.zeros(len(before), bool), trained, np.ones(len(after), bool)])
    return np.array(ids, np.int64), trained


def _bytes(rendered: Rendered, eod: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and whether each is trained on, of a tokenizer that cuts a text anywhere."""
    borders = sorted({0, len(rendered.text), *(border for span in rendered.spans for border in span)})
    ids: list[int] = []
    trained: list[bool] = []
    for first, end in itertools.pairwise(borders):
        part_ids: list[int] = []
        for number, part in enumerate(rendered.text[first:end].split(END_OF_TEXT)):
            part_ids += ([eod] if number else []) + list(part.encode())
        ids += part_ids
        trained += [any(begin <= first < stop for begin, stop in rendered.spans)] * len(part_ids)
    return np.array(ids, np.int64), np.array(trained, bool)
