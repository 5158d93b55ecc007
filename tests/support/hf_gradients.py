"""Gradients of transformers' models and of ours, next to each other."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.support.hf_models import FEWER, TOKENS, fixed, write_as_published

IN_FP64 = ("OLMo hybrid with rotation", "Qwen3.5 with experts", "GPT-Neo", "Persimmon", "OPT", "BioGPT without a scale")
"""Models some of whose gradients in fp32, ours and transformers', are further than 1e-5 of their norm from fp64."""


def our_gradients(task: tuple[bool, list[str]]) -> Any:
    """On ranks: load as `pretrain` does, and return this rank's share of the gradients of `write_gradients`, in fp64 or
    of a step in fp32; `put_together` makes one of those of all ranks."""
    in_fp64, arguments = task
    return gradients_in_fp64(arguments) if in_fp64 else _of_a_step(arguments)


def put_together(parts: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return gradients by our names of what each rank has."""
    from megatron_ext.plugins.prove.gather import assemble

    if isinstance(parts[0], dict):
        [whole] = parts
        return whole
    whole, flaws = assemble(parts[-1][0], (shard for _, shards in parts for shard in shards))
    assert flaws == []
    return whole


def _of_a_step(arguments: list[str]) -> tuple[Any, list[Any]]:
    from megatron_ext.plugins.prove import gather
    from megatron_ext.plugins.prove.recorded_training import build
    from megatron_ext.train.extensions import Extensions
    from megatron_ext.train.trainer import Callback, Trainer

    shards = []

    class Captured(Callback):
        def before_update(self, trainer: Trainer) -> None:
            shards.extend(gather.gradients(trainer.run))

    extensions = Extensions(datasets=fixed)
    with extensions.registered():
        run = build(arguments, extensions)
        Trainer(run, [Captured()]).step()
    run.loaders.close()
    return run.config, shards


def gradients_in_fp64(arguments: list[str]) -> dict[str, np.ndarray]:
    """On one rank: load as `pretrain` does, and return the gradients of `write_gradients` by our names, in fp64."""
    from megatron_ext import device
    from megatron_ext.model.names import by_expert, global_named_parameters, unwrapped
    from megatron_ext.plugins.huggingface.load_hf import load_huggingface
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    config = configure(arguments).config
    run = build_run(config, device.install("cpu"))
    assert config.checkpoint.load_hf is not None
    load_huggingface(run, config.checkpoint.load_hf)
    [model] = unwrapped(run.chunks)
    model.double()
    for parameter in model.parameters():
        parameter.grad = None
    tokens = torch.tensor(TOKENS)[:, : FEWER + 1]
    positions = torch.arange(FEWER).expand(len(tokens), -1)
    losses = model(
        input_ids=tokens[:, :-1], position_ids=positions, attention_mask=None, labels=tokens[:, 1:].contiguous()
    )
    losses.mean().backward()
    gradients = ((name, parameter.grad) for name, parameter in global_named_parameters(run.chunks))
    return {own: one.numpy() for name, all_ in gradients for own, one in by_expert(name, all_)}  # pyright: ignore


def write_gradients(model: Any, folder: Path, *, in_fp64: bool = False) -> None:
    """Write the gradients of the mean loss over the first of `TOKENS`, each predicted from those before, as the files
    have the weights. The model is lost."""
    if in_fp64:
        model = model.double()
        model.set_experts_implementation("eager")  # its grouped products know no fp64
    tokens = torch.tensor(TOKENS)[:, : FEWER + 1]
    with _rules_step_by_step(model):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".indexer." in name:  # which transformers does not train
                assert parameter.grad is None
            elif parameter.requires_grad:
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
    write_as_published(model, folder)


@contextmanager
def _rules_step_by_step(model: torch.nn.Module) -> Iterator[None]:
    """Have gated delta rules computed by transformers' recurrence in place of its chunks, in which the gradients of
    decays cancel: in fp32 they are off by 2e-5 of their norm (transformers 5.23)."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    with ExitStack() as stack:
        for one in modules:
            for chunks, steps in (
                ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
                ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
            ):
                if step_by_step := getattr(one, steps, None):
                    stack.enter_context(mock.patch.object(one, chunks, step_by_step))
        yield
