"""Small models that transformers makes in the shapes of `hf_shapes`, their logits and texts, and ours."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.plugins.huggingface.tiny_models import model_with_logits
from tests.support.hf_shapes import MODELS, VOCABULARY

LENGTH = 64
FEWER = LENGTH - 2
"""Tokens of a sample whose next ones are among `TOKENS`: an even number, for sequence parallelism."""
PROMPTS = [[17, 401, 33], [5], [900, 2, 77, 1002, 45, 3, 600, 8, 64, 250, 7]]
TOKENS = [[(7919 * position + 101 * row) % VOCABULARY for position in range(LENGTH)] for row in range(2)]


def write_model(folder: Path, name: str, **changes: Any) -> torch.nn.Module:
    """Write a model of `MODELS` with random weights."""
    from transformers import AutoConfig

    settings = {**MODELS[name], **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(1)
    model = model_with_logits(config).eval()
    move_weights(model)
    write_as_published(model, folder)
    return model


def move_weights(model: torch.nn.Module) -> None:
    """Move all weights at random: norms and biases begin all alike. Biases by which experts are chosen then lie near
    their scores."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.05))
        for name, kept in [*model.named_buffers(), *model.named_parameters()]:
            if name.endswith("e_score_correction_bias"):
                kept.copy_(0.1 * torch.randn_like(kept))


def write_as_published(model: Any, folder: Path) -> None:
    """Write a model as files are published, which transformers 5.23 reads, but does not write, of some families."""
    model.save_pretrained(folder)
    if (respelled := _AS_PUBLISHED.get(model.config.model_type)) is None:
        return
    file = folder / "model.safetensors"
    save_file(dict(respelled(model.config, load_file(file))), file, {"format": "pt"})


def _kimi_linear(_config: Any, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Layers without experts have an `mlp`."""
    for name, tensor in tensors.items():
        yield re.sub(r"block_sparse_moe\.(?=(gate|up|down)_proj)", "mlp.", name), tensor


def _olmo_hybrid(config: Any, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The convolution's tensors have the channels of queries, keys and values, and norms their usual names."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for name, tensor in tensors.items():
        name = name.replace("attention_layer_norm", "input_layernorm")
        name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
        prefix, found, _ = name.partition("q_conv1d")
        if found:
            names = [f"{prefix}{part}_conv1d.weight" for part in "qkv"]
            parts = torch.cat([tensors[one] for one in names]).tensor_split((keys, 2 * keys))
            yield from zip(names, (part.contiguous() for part in parts), strict=True)
        elif "conv1d" not in name:
            yield name, tensor


_AS_PUBLISHED = {"kimi_linear": _kimi_linear, "olmo_hybrid": _olmo_hybrid}


class Fixed:
    """The first of `TOKENS` as a dataset."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = np.array(TOKENS[index % len(TOKENS)][: FEWER + 1])
        mask, positions = np.ones(FEWER, np.float32), np.arange(FEWER)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": positions}


def fixed(_config: Any, _tokenizer: Any, samples: Any) -> Any:
    """Return `Fixed` as the datasets of a run."""
    made = {name: Fixed(count) if count else None for name, count in vars(samples).items()}
    return type(samples)(**made)


_PENALTY = 1.5
"""Without it, models that were not trained write one token over and over."""


def greedy(task: tuple[list[str], int]) -> list[list[int]]:
    """On ranks: load a checkpoint of ours, and go on from `PROMPTS` by so many tokens."""
    from megatron_ext.plugins.tasks.generation import generate
    from megatron_ext.plugins.tasks.sampling import Sampling
    from megatron_ext.plugins.tasks.trained_model import load_trained

    arguments, tokens = task
    # No longer than the original context of those whose frequencies depend on it.
    model = load_trained([*arguments, "--device", "cpu", "--seq-length", "36", "--micro-batch-size", "3"])
    sampling = Sampling(max_new_tokens=tokens, ignore_eod=True, repetition_penalty=_PENALTY)
    return [one.tokens for one in generate(model, PROMPTS, sampling)]


def their_choices(model: Any, written: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return what transformers' model would write at every place of `PROMPTS` that go on as `written`.

    Where that is `written`, it would write the same by itself, token after token. A pass over a whole text has no cache
    of which its rows could depend.
    """
    from transformers import RepetitionPenaltyLogitsProcessor

    penalized: Any = RepetitionPenaltyLogitsProcessor(_PENALTY)
    choices = []
    for prompt, tokens in zip(PROMPTS, written, strict=True):
        text = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            [logits] = model(input_ids=text[:, :-1], use_cache=False).logits
        places = range(len(prompt), text.size(1))
        choices.append([int(penalized(text[:, :at], logits[at - 1 : at].clone()).argmax()) for at in places])
    return choices


def reference_logits(model: torch.nn.Module) -> torch.Tensor:
    """[2, LENGTH, VOCABULARY] of the model itself."""
    with torch.no_grad():
        return model(input_ids=torch.tensor(TOKENS), use_cache=False).logits


def logits_of_folder(folder: str) -> torch.Tensor:
    """[2, LENGTH, VOCABULARY] of the model that transformers loads. Not where our adaptation of torch is installed."""
    from transformers import AutoModelForCausalLM

    return reference_logits(AutoModelForCausalLM.from_pretrained(folder).eval())


def flags(sources: Sequence[str], tp: int = 1, pp: int = 1) -> list[str]:
    """A run on `TOKENS` from `--load-hf DIR` or `--load DIR`."""
    return [
        *("--seq-length", str(LENGTH), "--micro-batch-size", "2", "--train-iters", "3", "--lr", "1e-3"),
        *("--mock-data", "--eval-interval", "0", "--device", "cpu"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--make-vocab-size-divisible-by", "16"),
        *("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)),
        *(["--sequence-parallel"] if tp == 2 else []),  # which experts need
        *("--moe-aux-loss-coeff", "0"),  # as transformers, whose class adds the loss only to outputs that have logits
        *sources,
    ]


def our_logits(arguments: list[str]) -> torch.Tensor | None:
    """On ranks: build the run, load as `pretrain` does, one forward pass over `TOKENS`.

    Returns:
        This rank's part of the vocabulary, [2, LENGTH, part], on the last stage.
    """
    from megatron_ext import device
    from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
    from megatron_ext.plugins.huggingface.load_hf import load_huggingface
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    config = configure(arguments).config
    run = build_run(config, device.install("cpu"))
    if config.checkpoint.load is not None:
        assert load_checkpoint(run, config.checkpoint.load) == 0
    else:
        assert config.checkpoint.load_hf is not None
        load_huggingface(run, config.checkpoint.load_hf)
    return forward(run)


def forward(run: Any) -> torch.Tensor | None:
    """One forward pass over `TOKENS`, through the pipeline's schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tokens = torch.tensor(TOKENS)
    positions = torch.arange(LENGTH).expand_as(tokens)

    def step(_iterator: Any, model: Any) -> Any:
        def collect(output: torch.Tensor, **_: Any) -> Any:
            return output

        return model(tokens, positions, None), collect

    for chunk in run.chunks:
        chunk.eval()
    with torch.no_grad():
        collected = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(())] * len(run.chunks),
            model=list(run.chunks),
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=True,
            collect_non_loss_data=True,
            pg_collection=run.groups,
            p2p_communicator=run.p2p,
        )
    return collected[0] if run.is_last_stage else None


def whole_vocabulary(parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The logits of all ranks without padding, [2, LENGTH, VOCABULARY]."""
    return torch.cat([part for part in parts if part is not None], dim=-1)[..., :VOCABULARY].float()


def quiet_transformers() -> None:
    """No progress bars, and no look at the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
