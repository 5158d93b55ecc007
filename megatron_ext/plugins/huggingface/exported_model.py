"""Proves an exported model: transformers, reading the new folder, and we, reading the checkpoint, agree.

They agree on logits, and on the loss of a preprocessed corpus; both models compute in fp32.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext import device
from megatron_ext.checkpoint.dtypes import DTYPES
from megatron_ext.config.schema import Config, LayoutConfig
from megatron_ext.data.integrity import check_indexed_files
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.huggingface.saved_model import SavedModel
from megatron_ext.plugins.huggingface.transformers_reference import mean_loss, their_logits, their_loss
from megatron_ext.tokenizer.from_flags import tokenizer_from_flags

_TEXT = "A language model reads text as a sequence of tokens, and for each of them it gives the odds of the next. "
_LENGTH = 128


@dataclass(frozen=True)
class Agreement:
    """How far the logits of the two models are apart, in fp32."""

    largest_difference: float
    largest_logit: float
    tokens: int
    earliest_of_equals: bool = False
    """Whether transformers was made to choose, of keys with equal scores of an indexer, the earliest, as ours does."""

    @property
    def holds(self) -> bool:
        """Whether rounding alone explains the difference: 1e-5, or 1e-5 of the largest logit."""
        return self.largest_difference <= 1e-5 * max(1.0, self.largest_logit)


@dataclass(frozen=True)
class LossAgreement:
    """The mean loss per token, in nats, of the two models."""

    ours: float
    theirs: float
    tokens: int
    earliest_of_equals: bool = False
    """Whether transformers was made to choose as `Agreement` says."""

    @property
    def relative_difference(self) -> float:
        """Difference of the losses over our loss."""
        return abs(self.ours - self.theirs) / abs(self.ours)

    @property
    def holds(self) -> bool:
        """Whether rounding alone explains the difference."""
        return self.relative_difference <= 1e-6


def compare_logits(source: SavedModel, folder: Path, dtype: str) -> Agreement:
    """Run both models in fp32, ours on the checkpoint's weights rounded to `dtype`, over the same tokens.

    Raises:
        ConfigurationError: transformers is not installed.
    """
    _need_transformers()
    device.install("cpu")
    tokens = _tokens(source.config)
    with our_model(source, dtype, tokens.size(1)) as model:
        ours = model(tokens)
    [theirs] = run_ranks(1, their_logits, str(folder), tokens.tolist(), fresh=True)
    difference = (ours - theirs).abs().max().item()
    return Agreement(difference, theirs.abs().max().item(), tokens.numel(), _has_indexer(source))


def compare_losses(source: SavedModel, folder: Path, dtype: str, prefix: str, samples: int) -> LossAgreement:
    """Return the losses of both models on the first `samples` samples of the corpus, each as long as a sample of
    training.

    Raises:
        ConfigurationError: transformers is not installed, or the corpus is shorter than one sample.
        DataError: the corpus is damaged.
    """
    _need_transformers()
    device.install("cpu")  # before megatron-core, which reads the corpus
    tokens = _corpus_samples(prefix, source.config.model.seq_length or _LENGTH, samples)
    with our_model(source, dtype, tokens.size(1) - 1) as model:
        ours = mean_loss(model, tokens)
    [theirs] = run_ranks(1, their_loss, str(folder), tokens.tolist(), fresh=True)
    return LossAgreement(ours, theirs, tokens[:, 1:].numel(), _has_indexer(source))


def _has_indexer(source: SavedModel) -> bool:
    return source.config.model.experimental_attention_variant == "dsa"


def _corpus_samples(prefix: str, length: int, samples: int) -> torch.Tensor:
    """Return the corpus from its beginning, [samples, length + 1]; the last token of a sample is the next one's
    first."""
    check_indexed_files(prefix)
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data: Any = IndexedDataset(prefix)
    tokens: list[int] = []
    for document in range(len(data)):
        tokens += data[document].tolist()
        if len(tokens) > samples * length:
            break
    samples = min(samples, (len(tokens) - 1) // length)
    if samples < 1:
        raise ConfigurationError(f"--check-loss {prefix} has {len(tokens)} tokens; one sample needs {length + 1}")
    return torch.tensor([tokens[start : start + length + 1] for start in range(0, samples * length, length)])


def _need_transformers() -> None:
    if not importlib.util.find_spec("transformers"):
        raise ConfigurationError(
            "transformers is not installed, so that the result cannot be checked: pip install transformers, or give "
            "--no-verify"
        )


def _tokens(config: Config) -> torch.Tensor:
    """Return tokens [1, sequence]: a text, where the tokenizer is at hand, else token ids from all over the
    vocabulary."""
    data = config.data
    length = _LENGTH
    if config.model.position_embedding_type == "learned_absolute":
        length = min(length, config.model.max_position_embeddings)
    ids = [(7919 * position) % data.vocab_size for position in range(length)]
    if data.tokenizer_type not in (None, "NullTokenizer"):
        try:
            tokenizer = tokenizer_from_flags(data)
            ids = tokenizer.encode(_TEXT * length)[:length]
        except ConfigurationError:
            pass  # its files are gone
    return torch.tensor([ids])


@contextmanager
def our_model(source: SavedModel, dtype: str, length: int) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield a function from tokens [batch, sequence] to logits [batch, sequence, vocabulary] in fp32.

    The weights are the checkpoint's, rounded to `dtype`. Where rotary frequencies depend on the length of sequences, as
    transformers chooses them, they are the frequencies for `length`.
    """
    here = device.install("cpu")
    from megatron.core import dist_checkpointing

    from megatron_ext.checkpoint.native.checkpoint_state_dict import CONTENT_METADATA
    from megatron_ext.model.config import transformer_config
    from megatron_ext.model.gpt import build_model
    from megatron_ext.parallel import groups

    config = _alone(source.config, length)
    collection = groups.initialize(config.layout, here)
    try:
        [model] = build_model(config, transformer_config(config, "cpu"), collection)
        metadata = {**CONTENT_METADATA, "dp_cp_group": collection.dp_cp}
        wanted: Any = model.sharded_state_dict(metadata=metadata)
        for name, one in wanted.items():
            wanted[name] = dataclasses.replace(one, key=source.saved_as(one.key))
        state: Any = dist_checkpointing.load({"model": wanted}, str(source.path), validate_access_integrity=False)
        model.load_state_dict(state["model"])
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, DTYPES[dtype])).float()
        model.eval()

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(tokens, torch.arange(tokens.size(1))[None], None)[..., : config.data.vocab_size]

        yield logits
    finally:
        groups.destroy()


def _alone(config: Config, length: int) -> Config:
    """Return the configuration of the same model in fp32 on one CPU process, for sequences of `length`."""
    training = dataclasses.replace(config.training, bf16=False, fp16=False)
    layout = LayoutConfig(world_size=1, device="cpu")
    model = dataclasses.replace(config.model, seq_length=length)
    return dataclasses.replace(config, model=model, training=training, layout=layout)
