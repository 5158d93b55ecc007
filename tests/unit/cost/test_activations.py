"""What recomputation saves, in measured bytes: each mode against the formulas of the planner (cost/activations.py)."""

from typing import Any

import pytest
import torch

from megatron_ext.config.schema import Config
from megatron_ext.cost.activations import Activations
from megatron_ext.data.microbatch import Ahead
from megatron_ext.parallel import groups
from megatron_ext.parts.attention.describe import FEW_KEYS, KEPT_ROWS
from megatron_ext.parts.stack import layers, stack
from megatron_ext.plugins.gated_delta.describe import SPAN
from tests.support.saved_bytes import bytes_held_for_backward
from tests.support.small_models import (
    CONVOLUTIONS,
    DELTA,
    LATENTS,
    LLAMA,
    MAMBA,
    OLMO2,
    build_small_model,
    small_config,
)

S, B, H, F, HEADS = 32, 2, 64, 96, 4
UNIT = 4 * S * B * H
"""Bytes of one [S, B, H] in fp32: a layer's input."""


def _config(number: int, other: dict[str, Any] | None = None, **recompute: Any) -> Config:
    sizes = {"num_layers": number, "seq_length": S, "max_position_embeddings": S}
    return small_config({**LLAMA, **sizes, **(other or {})}, training=recompute)


def _formula(number: int, other: dict[str, Any] | None = None, **recompute: Any) -> float:
    config = _config(number, other, **recompute)
    return Activations(config, fused=False).chunk(stack(config), first=True, last=True).held


def _held(number: int, other: dict[str, Any] | None = None, **recompute: Any) -> int:
    config = _config(number, other, **recompute)
    [gpt], _ = build_small_model(config)
    length = (other or {}).get("seq_length", S)
    tokens = torch.randint(0, 250, (B, length + 1), generator=torch.Generator().manual_seed(0))
    inputs, positions = tokens[:, :-1].contiguous(), torch.arange(length).expand(B, length)
    labels = tokens[:, 1:].contiguous()
    mask = torch.ones(B, S) if recompute.get("linear_cross_entropy") else None
    ahead = None
    if depths := config.model.mtp_num_layers:
        further = torch.stack([labels] * depths, dim=-1)
        ahead = Ahead(further, further, torch.ones(B, S, depths))
    given = [inputs, positions, labels, *(ahead or ())]
    held = bytes_held_for_backward(
        lambda: gpt(inputs, positions, labels=labels, loss_mask=mask, ahead=ahead), [*gpt.parameters(), *given]
    )
    groups.destroy()
    return held


def _full(method: str, number: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}


def _selective(*parts: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": parts}


LAYERS = 4
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "uniform, units of 1": _full("uniform", 1),
    "uniform, units of 2": _full("uniform", 2),
    "uniform, units of 3, and one of 1": _full("uniform", 3),
    "block of 1": _full("block", 1),
    "block of 3": _full("block", 3),
    "core_attn": _selective("core_attn"),
    "layernorm": _selective("layernorm"),
    "mlp": _selective("mlp"),
    "all parts": _selective("core_attn", "layernorm", "mlp"),
}


def test_every_mode_holds_what_its_formula_says() -> None:
    """The planner's formula, to the byte: embedding, output and loss included."""
    held = {mode: _held(LAYERS, **flags) for mode, flags in MODES.items()}
    assert held == {mode: _formula(LAYERS, **flags) for mode, flags in MODES.items()}
    in_order = ["uniform, units of 2", "uniform, units of 1", "block of 3", "all parts", "mlp", "block of 1", "none"]
    assert [held[mode] for mode in in_order] == sorted(held[mode] for mode in in_order)


def test_a_layer_is_what_docs_say() -> None:
    """15 residual streams, of which the parts are written out here."""
    config = _config(LAYERS)
    layer = Activations(config, fused=False).layer(layers(config)[0])
    assert layer.parts["core"] == 4 * B * HEADS * S * S  # weights of the softmax, in short sequences
    assert layer.parts["norms"] == 2 * (UNIT + 4 * S * B)  # output, and 1/RMS of every token
    assert layer.parts["mlp"] == 4 * UNIT * F // H  # gate and up (2F), silu(gate), their product
    assert layer.parts["heads"] == 2 * UNIT  # 2 groups of 4 heads
    assert layer.parts["residual"] + layer.parts["projection"] == 3 * UNIT
    assert _held(2) == 2 * layer.total + _held(LAYERS) - LAYERS * layer.total


@pytest.mark.parametrize(
    "model",
    [
        {"normalization": "LayerNorm", "swiglu": False, "disable_bias_linear": False},
        {"qk_layernorm": True, "num_query_groups": 4, "group_query_attention": False},
        {"squared_relu": True, "swiglu": False, "position_embedding_type": "learned_absolute"},
        {"hidden_dropout": 0.1},
        {"seq_length": FEW_KEYS + 2, "max_position_embeddings": FEW_KEYS + 2},
        {"seq_length": 2 * KEPT_ROWS + 2, "max_position_embeddings": 2 * KEPT_ROWS + 2},
        {"seq_length": 2 * KEPT_ROWS + 2, "max_position_embeddings": 2 * KEPT_ROWS + 2, "window_size": "9,0"},
        {"untie_embeddings_and_output_weights": False},
        {"mtp_num_layers": 2},
        {"mtp_num_layers": 1, "normalization": "LayerNorm"},
        LATENTS,
        {**LATENTS, "q_lora_rank": None, "v_head_dim": 20},
        {**LATENTS, "qk_layernorm": False},
        DELTA,
        CONVOLUTIONS,
        {**CONVOLUTIONS, "conv_bias": True, "seq_length": SPAN + 8, "max_position_embeddings": SPAN + 8},
        MAMBA,
        {**MAMBA, "hybrid_layer_pattern": "BB-B", "mlp_multipliers": (0.5, 2.0)},
        {**MAMBA, "hybrid_layer_pattern": "MMGM", "seq_length": SPAN + 8, "max_position_embeddings": SPAN + 8},
        {**DELTA, "linear_attention_freq": "[1,1,1,1]", "seq_length": SPAN + 8, "max_position_embeddings": SPAN + 8},
    ],
    ids=lambda model: " ".join(model),
)
def test_other_models_hold_what_the_formula_says(model: dict[str, Any]) -> None:
    assert _held(2, model) == _formula(2, model)


def test_a_loss_with_its_output_layer_holds_gradients() -> None:
    """In place of the softmax of 250 logits and of the final norm's output: of the hidden states, and of the matrix."""
    held = _held(2, linear_cross_entropy=True)
    assert held == _formula(2, linear_cross_entropy=True)
    logits, labels_and_weight = 4 * S * B * 250, 8 * S * B + 4
    assert held == _held(2) - logits - labels_and_weight - UNIT + UNIT + 4 * 256 * H


def test_depths_of_multi_token_prediction_hold_what_the_formula_says() -> None:
    modes = {
        mode: flags
        for mode, flags in MODES.items()
        if mode not in ("uniform, units of 2", "uniform, units of 3, and one of 1")
    }
    ahead = {"mtp_num_layers": 2}
    assert {mode: _held(LAYERS, ahead, **flags) for mode, flags in modes.items()} == {
        mode: _formula(LAYERS, ahead, **flags) for mode, flags in modes.items()
    }
    assert _held(2, ahead, linear_cross_entropy=True) == _formula(2, ahead, linear_cross_entropy=True)


def test_norms_after_attention_and_mlp_hold_what_the_formula_says() -> None:
    modes = {mode: flags for mode, flags in MODES.items() if "layernorm" not in flags.get("recompute_modules", ())}
    held = {mode: _held(LAYERS, OLMO2, **flags) for mode, flags in modes.items()}
    assert held == {mode: _formula(LAYERS, OLMO2, **flags) for mode, flags in modes.items()}


def test_selective_means_core_attention() -> None:
    assert _held(2, recompute_granularity="selective") == _held(2, **_selective("core_attn"))
