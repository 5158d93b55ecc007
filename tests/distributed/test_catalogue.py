"""The catalogue against the model that megatron-core builds: names, shapes, attributes and values, in every layout."""

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_ext.config.parameters import parameters, stages
from megatron_ext.config.schema import Config
from megatron_ext.model.names import global_named_parameters
from megatron_ext.verify.ranks import run_ranks
from tests.small_models import LLAMA, build_small_model, small_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "TP4 SP": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2 VPP2": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "PP2 VPP2, E|ttt|t|L": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "pipeline_model_parallel_layout": "E|t*3|t|L",
    },
    "TP2 PP2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "Llama": LLAMA,
    "tied Llama, qk-norm, QKV bias": {
        **LLAMA,
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": True,
        "add_qkv_bias": True,
    },
    "untied GPT-2, qk-norm, squared ReLU": {
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
        "squared_relu": True,
        "position_embedding_type": "none",
    },
}


@dataclass(frozen=True)
class Built:
    """What one rank says of one parameter that it holds."""

    shape: tuple[int, ...]
    tp_dim: int | None
    tp_stride: int
    sequence_parallel: bool
    dtype: str
    shard_hash: str
    """Of the values, or of the part of the whole tensor that lies on this rank."""


def _describe(config: Config) -> tuple[int, int, dict[str, Built]]:
    chunks, pg_collection = build_small_model(config)
    built = {}
    for name, tensor in global_named_parameters(chunks):
        built[name] = Built(
            shape=tuple(tensor.shape),
            tp_dim=getattr(tensor, "partition_dim", 0) if getattr(tensor, "tensor_model_parallel", False) else None,
            tp_stride=getattr(tensor, "partition_stride", 1),
            sequence_parallel=getattr(tensor, "sequence_parallel", False),
            dtype=str(tensor.dtype),
            shard_hash=_hash(tensor.data),
        )
    return pg_collection.pp.rank(), pg_collection.tp.rank(), built


def _values(config: Config) -> dict[str, torch.Tensor]:
    chunks, _ = build_small_model(config)
    return {name: tensor.data for name, tensor in global_named_parameters(chunks)}


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _shard(whole: torch.Tensor, tp_dim: int | None, stride: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    if tp_dim is None:
        return whole
    return torch.cat([part.chunk(tp_size, tp_dim)[tp_rank] for part in whole.chunk(stride, tp_dim)], tp_dim)


@pytest.fixture(scope="module")
def whole_model() -> dict[str, dict[str, torch.Tensor]]:
    return {name: run_ranks(1, _values, small_config(model)) for name, model in MODELS.items()}  # pyright: ignore


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_catalogue_is_the_model(layout: str, model: str, whole_model: Any) -> None:
    sizes = LAYOUTS[layout]
    tp, pp = sizes.get("tensor_model_parallel_size", 1), sizes.get("pipeline_model_parallel_size", 1)
    config = small_config(MODELS[model], {**sizes, "world_size": tp * pp})
    for pp_rank, tp_rank, built in run_ranks(tp * pp, _describe, config):
        expected = {
            parameter.name: Built(
                shape=parameter.local_shape(tp),
                tp_dim=parameter.tp_dim,
                tp_stride=parameter.tp_stride,
                sequence_parallel=parameter.sequence_parallel and config.layout.sequence_parallel,
                dtype="torch.float32",
                shard_hash=_hash(
                    _shard(whole_model[model][0][parameter.name], parameter.tp_dim, parameter.tp_stride, tp_rank, tp)
                ),
            )
            for parameter in parameters(config)
            if pp_rank in stages(config, parameter)
        }
        assert built == expected


@pytest.mark.parametrize("model", MODELS)
def test_bf16_weights_are_the_rounded_fp32_ones(model: str, whole_model: Any) -> None:
    [values] = run_ranks(1, _values, small_config(MODELS[model], training={"bf16": True}))
    assert values.keys() == whole_model[model][0].keys()
    for name, value in values.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, whole_model[model][0][name].bfloat16()), name
