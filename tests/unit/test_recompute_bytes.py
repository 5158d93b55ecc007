"""What recomputation saves, in measured bytes: each mode against the formula of docs/parallelism.md."""

from typing import Any

import torch

from megatron_ext.parallel import groups
from megatron_ext.verify.saved_bytes import bytes_held_for_backward
from tests.small_models import LLAMA, build_small_model, small_config

S, B, H, F, HEADS = 32, 2, 64, 96, 4
UNIT = 4 * S * B * H
"""Bytes of one [S, B, H] in fp32: a layer's input."""


def _held(layers: int, **recompute: Any) -> int:
    model = {**LLAMA, "num_layers": layers, "seq_length": S, "max_position_embeddings": S}
    [gpt], _ = build_small_model(small_config(model, training=recompute))
    tokens = torch.randint(0, 250, (B, S + 1), generator=torch.Generator().manual_seed(0))
    inputs, positions = tokens[:, :-1].contiguous(), torch.arange(S).expand(B, S)
    labels = tokens[:, 1:].contiguous()
    held = bytes_held_for_backward(
        lambda: gpt(inputs, positions, labels=labels), [*gpt.parameters(), inputs, positions, labels]
    )
    groups.destroy()
    return held


def _full(method: str, number: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}


def _selective(*parts: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": parts}


LAYERS = 4
CORE_ATTENTION = UNIT + 4 * B * HEADS * S  # context and the softmax's normalizer
NORMS = 2 * (UNIT + 4 * S * B)  # output, and 1/RMS of every token
MLP = 5 * UNIT * F // H  # gate and up (2F), silu(gate), a copy of up, their product
LAYER = 2 * UNIT + NORMS + 2 * UNIT + UNIT + CORE_ATTENTION + MLP
"""Residual stream around attention; norms; q, k, v (2 groups of 4 heads); the projection's input."""


def test_every_mode_holds_what_its_formula_says() -> None:
    plain = _held(LAYERS)
    rest = plain - LAYERS * LAYER  # embedding, final norm, output and loss
    assert _held(2) == 2 * LAYER + rest
    saved = {
        "uniform, units of 1": (_full("uniform", 1), LAYERS * LAYER - 4 * UNIT),
        "uniform, units of 2": (_full("uniform", 2), LAYERS * LAYER - 2 * UNIT),
        "uniform, units of 3, and one of 1": (_full("uniform", 3), LAYERS * LAYER - 2 * UNIT),
        "block of 1": (_full("block", 1), LAYER - UNIT),
        "block of 3": (_full("block", 3), 3 * (LAYER - UNIT)),
        "core_attn": (_selective("core_attn"), LAYERS * CORE_ATTENTION),
        "layernorm": (_selective("layernorm"), LAYERS * NORMS),
        "mlp": (_selective("mlp"), LAYERS * MLP),
        "all parts": (_selective("core_attn", "layernorm", "mlp"), LAYERS * (CORE_ATTENTION + NORMS + MLP)),
    }
    held = {mode: _held(LAYERS, **flags) for mode, (flags, _) in saved.items()}
    assert held == {mode: plain - less for mode, (_, less) in saved.items()}
    in_order = ["uniform, units of 2", "uniform, units of 1", "block of 3", "all parts", "mlp", "block of 1"]
    assert [held[mode] for mode in in_order] == sorted(held[mode] for mode in in_order)


def test_selective_means_core_attention() -> None:
    assert _held(2, recompute_granularity="selective") == _held(2, **_selective("core_attn"))
