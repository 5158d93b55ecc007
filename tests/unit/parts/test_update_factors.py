"""Rates, epsilons, initial weights and multipliers under --use-mup are megatron-core's, those of depth the paper's."""

import shlex
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_mup_config_overrides
from megatron.core.transformer import TransformerConfig

from megatron_ext.config.schema import Config
from megatron_ext.parts.catalogue import parameters
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.update_factors import Factors, factors, read_group
from megatron_ext.train.configure import configure

MODEL = (
    "--device cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --eval-interval 0 --init-method-std 0.1 "
    "--untie-embeddings-and-output-weights"
)
MUP = "--use-mup --mup-base-hidden-size 16"


def _configured(flags: str) -> Config:
    return configure(shlex.split(f"{MODEL} {flags}")).config


def _by_name(config: Config) -> dict[str, tuple[Parameter, Factors]]:
    return {one.name: (one, factors(config, one)) for one in parameters(config)}


@pytest.mark.parametrize(
    ("flags", "own"),
    [
        ("", {}),
        ("--mup-base-head-dim 9", {"mup_base_head_dim": 9.0}),
        ("--mup-attn-scale-power 0.5 --mup-output-mult 3", {"mup_attn_scale_power": 0.5, "mup_output_mult": 3.0}),
        ("--kv-channels 24 --mup-embedding-mult 2", {"kv_channels": 24, "mup_embedding_mult": 2.0}),
        (
            "--softmax-scale 0.5 --embedding-init-method-std 0.3",
            {"softmax_scale": 0.5, "embedding_init_method_std": 0.3},
        ),
    ],
)
def test_the_model_is_that_of_megatron_core(flags: str, own: dict[str, Any]) -> None:
    config = _configured(f"{MUP} {flags}")
    core: Any = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, use_mup=True, mup_base_hidden_size=16,
        init_method_std=0.1, **own,
    )  # fmt: skip
    model = config.model
    assert (model.mup_width_mult, model.softmax_scale) == (core.mup_width_mult, core.softmax_scale)
    assert (model.logits_multiplier, model.embedding_multiplier) == (core.mup_output_mult, core.mup_embedding_mult)
    found = {name: one.std for name, (one, _) in _by_name(config).items()}
    assert found["decoder.layers.2.mlp.linear_fc1.weight"] == core.init_method.keywords["std"]
    assert found["decoder.layers.2.mlp.linear_fc2.weight"] == pytest.approx(
        core.output_layer_init_method.keywords["std"]
    )
    assert found["embedding.word_embeddings.weight"] == core.embedding_init_method.keywords["std"]
    if not own.get("embedding_init_method_std"):
        assert found["output_layer.weight"] == core.embedding_init_method.keywords["std"]


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lion"])
def test_rates_and_epsilons_are_those_of_megatron_core(optimizer: str) -> None:
    config = _configured(f"{MUP} --optimizer {optimizer}")
    overrides = get_mup_config_overrides(CoreOptimizerConfig(lr=1.0, min_lr=0.5, adam_eps=1.0), 4.0, optimizer)
    for one, found in _by_name(config).values():
        weight: Any = torch.nn.Parameter(torch.empty(one.shape, device="meta"))
        weight.is_embedding_parameter = one.stage in ("embedding", "output") and len(one.shape) > 1
        own = {
            name: value
            for key, override in overrides.items()
            if key.matches(weight, one.name)
            for name, value in override.items()
        }
        assert found.rate == own.get("max_lr", 1.0)
        if optimizer == "adam":
            assert found.epsilon == own.get("eps", 1.0)
        assert found.weight_decay == float(one.decay)


def test_the_base_is_the_usual_model() -> None:
    usual, base = _configured(""), _configured("--use-mup --mup-base-num-layers 4 --mup-base-head-dim 16")
    assert _by_name(base) == _by_name(usual)
    assert base.model.residual_multiplier == base.model.logits_multiplier == 1.0
    assert base.model.softmax_scale == 1 / 16**0.5


def test_depth_by_completep() -> None:
    """arXiv:2505.01618, table 1, alpha 1: m_N = 4, m_L = 4 / 2."""
    config = _configured(f"{MUP} --mup-base-num-layers 2")
    found = {name: (one.std, values) for name, (one, values) in _by_name(config).items()}
    assert config.model.residual_multiplier == 0.5
    assert found["decoder.layers.1.mlp.linear_fc1.weight"] == (0.05, Factors(0.25, 4.0, 1 / 8))
    assert found["decoder.layers.1.mlp.linear_fc2.weight"] == (0.025, Factors(0.25, 4.0, 1 / 8))
    assert found["decoder.layers.1.input_layernorm.weight"][1] == Factors(1.0, 0.0, 1 / 8)
    assert found["embedding.word_embeddings.weight"] == (0.1, Factors(1.0, 1.0, 1 / 4))
    assert found["output_layer.weight"] == (0.1, Factors(1.0, 1.0, 1 / 4))


def test_muons_matrices_have_a_size_of_their_own() -> None:
    found = _by_name(_configured(f"{MUP} --optimizer muon --muon-scale-mode unit_rms_norm"))
    assert found["decoder.layers.1.mlp.linear_fc1.weight"][1] == Factors()
    said = configure(shlex.split(f"{MODEL} {MUP} --optimizer muon")).typed.warnings
    assert any("--muon-scale-mode unit_rms_norm keeps it" in one for one in said)


def test_the_last_group_that_names_a_weight_counts() -> None:
    groups = "--lr-group *=0.5 --lr-group decoder.layers.[01].*=2 *norm*=3 --weight-decay-group *.linear_fc1.*=10"
    found = {name: values for name, (_, values) in _by_name(_configured(groups)).items()}
    assert found["embedding.word_embeddings.weight"] == Factors(0.5)
    assert found["decoder.layers.1.mlp.linear_fc1.weight"] == Factors(2.0, 10.0)
    assert found["decoder.layers.3.mlp.linear_fc1.weight"] == Factors(0.5, 10.0)
    assert found["decoder.layers.1.mlp.linear_fc1.bias"] == Factors(2.0, 0.0)
    assert found["decoder.final_layernorm.weight"] == Factors(3.0, 0.0)
    assert read_group("a=b=0.5") == ("a=b", 0.5)
