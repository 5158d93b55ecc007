"""Rearranges documents so that a model learns to fill in their middle (--fim-data; Bavarian et al., arXiv 2207.14255).

A document that is drawn is cut at two characters into prefix, middle and suffix, and becomes, with a token before each,
prefix suffix middle (PSM), or suffix prefix middle (SPM, the paper's second variant, in which prefix and middle stand
in one piece). The draws depend only on the seed and the sample's place: they are the same in every layout, and after
every resume.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.config.schema import Config
from megatron_ext.data.samples import SampleDataset, Samples, SampleWindow
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

_UNREADABLE = "\ufffd"
"""The character that a decoder writes for bytes that are no character: a sample may begin or end within one."""


@dataclass(frozen=True)
class Rearrangement:
    """Fill-in-the-middle of a range of tokens, as the flags --fim-* configure it."""

    tokenizer: Tokenizer
    encode: Callable[[str], Sequence[int]]
    """Text -> its ids, without any that a tokenizer puts around a text."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    split: int | None
    """The token at which a document is cut into fragments, each of which is drawn by itself."""

    rate: float
    fragment_rate: float
    spm_rate: float
    not_before: str | None
    """Texts that begin so are left as they are."""

    @classmethod
    def of(cls, config: Config, tokenizer: Tokenizer) -> "Rearrangement":
        """Return the rearrangement that the flags configure.

        Raises:
            ConfigurationError: the tokenizer does not have one of the tokens.
        """
        data = config.data
        rendered = getattr(tokenizer, "encode_rendered", None)
        encode = tokenizer.encode if rendered is None else lambda text: rendered(text)[0]
        prefix, middle, suffix, pad = (
            _token_id(encode, name, getattr(data, name))
            for name in ("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token")
        )
        split = data.fim_split_sample
        return cls(
            *(tokenizer, encode, prefix, middle, suffix, pad),
            split=None if split is None else _token_id(encode, "fim_split_sample", split),
            rate=data.fim_rate,
            fragment_rate=data.fim_rate if data.fim_fragment_rate is None else data.fim_fragment_rate,
            spm_rate=data.fim_spm_rate,
            not_before=data.fim_no_prefix,
        )

    def of_tokens(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return tokens of one or several documents, int64 [tokens], each rearranged or left; mostly more of them."""
        return _between(tokens, self.tokenizer.eod, lambda part: self._of_document(part, random))

    def _of_document(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if self.split is None or not (tokens == self.split).any():
            return self._of_fragment(tokens, self.rate, random)
        if random.random() >= self.rate:
            return tokens
        return _between(tokens, self.split, lambda part: self._of_fragment(part, self.fragment_rate, random))

    def _of_fragment(self, tokens: np.ndarray, rate: float, random: np.random.Generator) -> np.ndarray:
        if random.random() >= rate:
            return tokens
        text = self.tokenizer.decode(tokens.tolist())
        if _UNREADABLE in text or (self.not_before is not None and text.startswith(self.not_before)):
            return tokens
        first, second = np.sort(random.integers(0, len(text), size=2, endpoint=True))
        prefix, middle, suffix = map(self.encode, (text[:first], text[first:second], text[second:]))
        if random.random() < self.spm_rate:
            ids = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            ids = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.asarray(ids, np.int64)


def _token_id(encode: Callable[[str], Sequence[int]], name: str, text: str) -> int:
    try:
        ids = encode(text)
    except ValueError:  # a tokenizer that knows numbers alone
        ids = []
    if len(ids) != 1:
        flag = "--" + name.replace("_", "-")
        raise ConfigurationError(
            f"{flag} {text} is {len(ids)} tokens of this tokenizer, not one; name one that it has, or add it by "
            f"--tokenizer-special-tokens {text} to --tokenizer-type HuggingFaceTokenizer"
        )
    return ids[0]


def _between(tokens: np.ndarray, mark: int, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the tokens with every range between two marks changed; marks and empty ranges stay."""

    def parts() -> Iterator[np.ndarray]:
        begin = 0
        for end in [*np.flatnonzero(tokens == mark), len(tokens)]:
            yield change(tokens[begin:end]) if end > begin else tokens[begin:end]
            yield tokens[end : end + 1]
            begin = end + 1

    return np.concatenate(list(parts()))


class FillInTheMiddle:
    """Samples of one split whose documents are rearranged. The length of a sample stays: a longer one is cut off at its
    end, a shorter one is padded with a token that does not count in the loss.

    Args:
        samples: the samples before rearrangement.
        seed: the draws depend on it and on the sample's place.
        eod_mask_loss: whether predictions of the token after an end of document do not count in the loss.
    """

    def __init__(self, samples: Samples, change: Rearrangement, seed: Sequence[int], *, eod_mask_loss: bool):
        self._samples, self._change, self._seed, self._eod_mask_loss = samples, change, seed, eod_mask_loss
        self.sources = samples.sources

    @property
    def order_depends_on(self) -> list[int]:
        """Numbers, other than flags and files, that determine the order of the samples."""
        return self._samples.order_depends_on

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._changed(self._samples[index], [0, index])

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each source."""
        return self._samples.counts(samples)

    def window_at(self, index: int) -> SampleWindow:
        """Return where sample `index` lies."""
        return self._samples.window_at(index)

    def part(self, source: int) -> SampleDataset:
        """Return the samples of one source alone, in the order in which they appear here."""
        return _Part(self, self._samples.part(source), source)

    def _changed(self, sample: Mapping[str, Any], place: Sequence[int]) -> dict[str, np.ndarray]:
        """Return a sample's rearranged fields, [seq] each, with the draws of its place."""
        tokens = np.append(np.asarray(sample["tokens"]), np.asarray(sample["labels"])[-1:])
        changed = self._change.of_tokens(tokens, np.random.default_rng([*self._seed, *place]))
        whole = np.full(len(tokens), self._change.pad, np.int64)
        whole[: len(changed)] = changed[: len(tokens)]
        counts = np.arange(1, len(tokens)) < len(changed)
        if self._eod_mask_loss:
            counts &= whole[:-1] != self._change.tokenizer.eod
        return {
            "tokens": whole[:-1],
            "labels": whole[1:],
            "loss_mask": counts.astype(np.float32),
            "position_ids": np.arange(len(whole) - 1),
        }


@dataclass(frozen=True)
class _Part:
    """The samples of one source of `whole`."""

    whole: FillInTheMiddle
    samples: SampleDataset
    source: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.whole._changed(self.samples[index], [self.source + 1, index])
