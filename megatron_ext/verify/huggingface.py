"""Proof of an exported model: transformers, reading the new folder, and we, reading the checkpoint, agree on logits."""

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext import device
from megatron_ext.checkpoint.hf_export import SavedModel
from megatron_ext.config.schema import Config, LayoutConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.build import tokenizer_from_flags
from megatron_ext.verify.ranks import run_ranks

_TEXT = "A language model reads text as a sequence of tokens, and for each of them it gives the odds of the next. "
_LENGTH = 128


@dataclass(frozen=True)
class Agreement:
    """How far the logits of the two models are apart, in fp32."""

    largest_difference: float
    largest_logit: float
    tokens: int

    @property
    def holds(self) -> bool:
        """Whether rounding alone explains the difference: 1e-5, or 1e-5 of the largest logit."""
        return self.largest_difference <= 1e-5 * max(1.0, self.largest_logit)


def compare_logits(source: SavedModel, folder: Path, dtype: torch.dtype) -> Agreement:
    """Run both models in fp32, ours on the checkpoint's weights rounded to `dtype`, over the same tokens.

    Raises:
        ConfigurationError: transformers is not installed.
    """
    if not importlib.util.find_spec("transformers"):
        raise ConfigurationError(
            "transformers is not installed, so that the result cannot be checked: pip install transformers, or give "
            "--no-verify"
        )
    tokens = _tokens(source.config)
    ours = _our_logits(source, dtype, tokens)
    # In a process of its own: what the device room replaces in torch leaves transformers' rotary tables unfilled.
    [theirs] = run_ranks(1, their_logits, str(folder), tokens.tolist(), fresh=True)
    difference = (ours - theirs).abs().max().item()
    return Agreement(difference, theirs.abs().max().item(), tokens.numel())


def _tokens(config: Config) -> torch.Tensor:
    """[1, sequence]: a text, where the tokenizer is at hand, else token ids from all over the vocabulary."""
    data = config.data
    assert data.vocab_size is not None
    length = _LENGTH
    if config.model.position_embedding_type == "learned_absolute":
        length = min(length, config.model.max_position_embeddings)
    ids = [(7919 * position) % data.vocab_size for position in range(length)]
    if data.tokenizer_type not in (None, "NullTokenizer"):
        try:
            tokenizer = tokenizer_from_flags(data)
            ids = tokenizer.encode(_TEXT * length)[:length]
        except ConfigurationError:
            pass  # its files are no longer there
    return torch.tensor([ids])


def _our_logits(source: SavedModel, dtype: torch.dtype, tokens: torch.Tensor) -> torch.Tensor:
    here = device.install("cpu")
    from megatron.core import dist_checkpointing

    from megatron_ext.checkpoint.contents import CONTENT_METADATA
    from megatron_ext.model.config import transformer_config
    from megatron_ext.model.gpt import build_model
    from megatron_ext.parallel import groups

    config = _alone(source.config)
    collection = groups.initialize(config.layout, here)
    try:
        [model] = build_model(config, transformer_config(config, "cpu"), collection)
        metadata = {**CONTENT_METADATA, "dp_cp_group": collection.dp_cp}
        state: Any = dist_checkpointing.load(
            {"model": model.sharded_state_dict(metadata=metadata)}, str(source.path), validate_access_integrity=False
        )
        model.load_state_dict(state["model"])
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()
        model.eval()
        with torch.no_grad():
            logits = model(tokens, torch.arange(tokens.size(1))[None], None)
        return logits[..., : config.data.vocab_size]
    finally:
        groups.destroy()


def _alone(config: Config) -> Config:
    """The same model in fp32 on one process."""
    training = dataclasses.replace(config.training, bf16=False, fp16=False)
    layout = LayoutConfig(world_size=1, device="cpu")
    return dataclasses.replace(config, training=training, layout=layout)


def their_logits(folder: str, tokens: list[list[int]]) -> torch.Tensor:
    """[batch, sequence, vocabulary] in fp32, by transformers. No code from the folder is run."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(tokens)).logits
