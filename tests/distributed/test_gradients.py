"""Gradients of one microbatch under tensor and sequence parallelism, by global name, against one process.

Each of these models has a parameter whose gradient is easily wrong there: norms under sequence parallelism, query
and key norms (each rank sees its own heads alone), key/value heads that several ranks share, biases added after a
reduction, learned positions.
"""

import functools
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from megatron_ext.config.schema import Config
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.model.loss import token_loss
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parts.catalogue import parameters
from megatron_ext.plugins.prove.compared_models import MODELS as COMPARED
from megatron_ext.plugins.prove.compared_models import RECIPE
from megatron_ext.plugins.prove.recorded_training import record
from megatron_ext.train.configure import configure
from tests.support.corpora import write_documents
from tests.support.several_models import in_turn
from tests.support.small_models import LLAMA, build_small_model, small_config

MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "GPT-2, qk-norm": {"qk_layernorm": True},
    "Llama, qk-norm, tied": {**LLAMA, "qk_layernorm": True, "untie_embeddings_and_output_weights": False},
    "Llama, one query group, QKV bias": {**LLAMA, "num_query_groups": 1, "add_qkv_bias": True},
    "Llama, partial scaled rotary": {**LLAMA, "rotary_percent": 0.5, "use_rope_scaling": True},
}


def _gradients(config: Config) -> tuple[float, dict[str, torch.Tensor]]:
    [gpt], pg_collection = build_small_model(config)
    # Norms that are not all ones and biases that are not all zeros, the same on every rank.
    for name, tensor in global_named_parameters([gpt]):
        if "norm" in name or (name.endswith("bias") and not getattr(tensor, "tensor_model_parallel", False)):
            generator = torch.Generator().manual_seed(len(name))
            tensor.data.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    model = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt, pg_collection=pg_collection)
    tokens = torch.randint(0, 250, (3, 17), generator=torch.Generator().manual_seed(0))
    mask = (torch.rand(3, 16, generator=torch.Generator().manual_seed(1)) < 0.8).float()
    losses = model(tokens[:, :-1], torch.arange(16).expand(3, 16), None, labels=tokens[:, 1:])
    loss_sum, num_tokens, report = token_loss(mask, losses)
    assert num_tokens == mask.sum()
    loss_sum.backward()
    finalize_model_grads([model], num_tokens, pg_collection=pg_collection)
    loss = float(report["lm loss"][0] / report["lm loss"][1])
    return loss, {name: tensor.main_grad.clone() for name, tensor in global_named_parameters([model])}  # pyright: ignore


def _joined(config: Config, results: list[tuple[float, dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    joined = {}
    for parameter in parameters(config):
        shards = [gradients[parameter.name] for _, gradients in results]
        if parameter.tp_dim is None:
            assert all(torch.equal(shard, shards[0]) for shard in shards), f"ranks disagree on {parameter.name}"
            joined[parameter.name] = shards[0]
        else:
            parts = zip(*(shard.chunk(parameter.tp_stride, parameter.tp_dim) for shard in shards), strict=True)
            joined[parameter.name] = torch.cat([part for parts_ in parts for part in parts_], parameter.tp_dim)
    return joined


def _config(model: str, tp: int, sequence_parallel: bool) -> Config:
    layout = {"tensor_model_parallel_size": tp, "world_size": tp, "sequence_parallel": sequence_parallel}
    return small_config({**MODELS[model], "num_layers": 2}, layout)


# Four ranks without sequence parallelism: left to --all.
CASES = [
    pytest.param(model, tp, sequence_parallel, marks=[pytest.mark.slow] * (tp == 4 and not sequence_parallel))
    for model in MODELS
    for tp in (2, 4)
    for sequence_parallel in (False, True)
]


@pytest.fixture(scope="module")
def results_of(request: pytest.FixtureRequest) -> Callable[[str, int, bool], list[tuple[float, dict[str, Any]]]]:
    """What each rank found; the ranks of a size compute everything that is asked of them in one go."""
    name = "test_gradients_equal_those_of_one_process"
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    items = [item for item in items if item.originalname == name]
    asked = {tuple(item.callspec.params[of] for of in ("model", "tp", "sequence_parallel")) for item in items}

    @functools.cache
    def of_size(tp: int) -> dict[tuple[str, bool], Any]:
        cases = [(model, sequence) for model in MODELS for sequence in (False, True) if (model, tp, sequence) in asked]
        cases = cases if tp > 1 else [(model, False) for model in MODELS]
        by_rank = run_ranks(tp, in_turn, _gradients, [_config(model, tp, sequence) for model, sequence in cases])
        return dict(zip(cases, zip(*by_rank, strict=True), strict=True))

    return lambda model, tp, sequence_parallel: list(of_size(tp)[model, sequence_parallel])


@pytest.mark.first("GPT-2-2-False", "GPT-2-2-True")
@pytest.mark.parametrize(("model", "tp", "sequence_parallel"), CASES)
def test_gradients_equal_those_of_one_process(model: str, tp: int, sequence_parallel: bool, results_of: Any) -> None:
    config = _config(model, tp, sequence_parallel)
    [(expected_loss, expected)] = results_of(model, 1, False)
    results = results_of(model, tp, sequence_parallel)
    for loss, _ in results:
        assert loss == pytest.approx(expected_loss, rel=1e-6)
    got = _joined(config, results)
    assert got.keys() == expected.keys()
    whole_norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in got.items():
        # Small beside the whole gradient, a difference is rounding. (The bias of a key norm without rotary has no
        # gradient but rounding: it moves all scores of a query alike, which the softmax does not see.)
        allowed = max(1e-5 * expected[name].norm(), 1e-7 * whole_norm)
        error = (gradient - expected[name]).norm()
        assert error < allowed, f"{name}: {error:.1e}, allowed {allowed:.1e}"


# Every kind of parameter is in one of them, and all experts and keys are chosen: rounding changes no choice.
EVERY_KIND = {
    "learned positions, biases": "",
    "ALiBi": "",
    "OLMo-2": "",
    "Phi": "",
    "xIELU": "",
    "a token ahead by chosen keys": "--dsa-indexer-topk 512",
    "one token ahead": "",
    "hybrid, two tokens ahead": "--moe-router-topk 8",
    "tied hybrid, a token ahead": "",
    "experts with biases": "--moe-router-topk 8",
    "experts in a latent width": "--moe-router-topk 8",
    "routing by groups": "--moe-router-topk 16 --moe-router-group-topk 4",
    "a token ahead by latents and experts": "--moe-router-topk 8",
    "Kimi Linear": "--moe-router-topk 8",
    "Falcon-H1, packed": "",
    "Mamba-2 hybrid": "",
    "delta rules with LayerNorm": "",
    "short convolutions, packed": "",
    "Mamba-1 hybrid": "",
}
LEARNED = "learned positions, biases"
IN_16_BITS = [
    *((1, model, f"--bf16 {flags}") for model, flags in EVERY_KIND.items()),
    (1, LEARNED, "--bf16 --deterministic-mode"),
    (2, LEARNED, "--bf16 --tensor-model-parallel-size 2 --sequence-parallel"),
    (2, LEARNED, "--bf16 --tensor-model-parallel-size 2 --deterministic-mode"),
]
FREQUENT_TOKENS = [*RECIPE.split(), *shlex.split("--tokenizer-type ByteTokenizer --eval-iters 0 --num-workers 0")]
FREQUENT_TOKENS += shlex.split("--seq-length 512 --max-position-embeddings 512 --micro-batch-size 4")
FREQUENT_TOKENS += shlex.split("--global-batch-size 4 --split 100,0,0")


@pytest.mark.first("1-learned positions, biases---bf16 ")
@pytest.mark.parametrize(("ranks", "model", "flags"), IN_16_BITS)
def test_gradients_in_16_bits_count_every_token_of_a_repetitive_text(
    ranks: int, model: str, flags: str, tmp_path: Path
) -> None:
    """Of a text of two letters each occurs 1,024 times in the microbatch. A sum of equal numbers ends in bf16 at 256 of
    them; rounding alone moves a gradient by some percent at most."""
    data = write_documents(tmp_path / "text", [list(b"ab" * 2000)])
    words = [*FREQUENT_TOKENS, *shlex.split(COMPARED[model]), "--data-path", data, *shlex.split(flags)]
    in_fp32 = [word for word in words if word != "--bf16"]
    known, found = (record(one, ranks, steps=1).gradients for one in (in_fp32, words))
    whole_norm = np.linalg.norm([np.linalg.norm(gradient) for gradient in known.values()])
    assert known.keys() == found.keys()
    for name, gradient in known.items():
        error = np.linalg.norm(found[name] - gradient) / max(np.linalg.norm(gradient), 1e-3 * whole_norm)
        assert error < 0.1, name


def _kinds_of_parameters(model: str) -> set[str]:
    flags = [*FREQUENT_TOKENS, *shlex.split(COMPARED[model]), "--mock-data", "--device", "cpu"]
    return {re.sub(r"\d+\.", "", parameter.name) for parameter in parameters(configure(flags).config)}


def test_every_kind_of_parameter_has_its_gradient_in_16_bits_compared() -> None:
    everywhere, compared = (set().union(*map(_kinds_of_parameters, models)) for models in (COMPARED, EVERY_KIND))
    assert everywhere == compared
