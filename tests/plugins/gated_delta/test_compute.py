"""A layer of the gated delta rule against transformers', its documents each by itself, and generation."""

import math
from typing import Any

import pytest
import torch

from megatron_ext.parallel import groups
from megatron_ext.plugins.gated_delta import compute
from tests.support.generated_texts import MORE, assert_documents_are_as_each_by_itself, going_on, recurrent_layer
from tests.support.small_models import DELTA, build_small_model, small_config

KDA: dict[str, Any] = {"experimental_attention_variant": "kda", "linear_num_value_heads": 4, "linear_value_head_dim": 6}
SHARED_KEYS: dict[str, Any] = {**KDA, "linear_num_value_heads": 8, "linear_value_head_dim": 10}
ODD = {"linear_key_head_dim": 5, "linear_value_head_dim": 3, "linear_num_key_heads": 1, "linear_num_value_heads": 3}


def _layer(changes: dict[str, Any] | None = None) -> Any:
    return recurrent_layer({**DELTA, "norm_epsilon": 1e-6, **(changes or {})})


@pytest.mark.parametrize("changes", [{}, ODD, {"linear_conv_kernel_dim": 2}], ids=str)
@pytest.mark.parametrize("span", [compute.SPAN, 70])
def test_a_layer_is_that_of_transformers(changes: dict[str, Any], span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    monkeypatch.setattr(compute, "SPAN", span)
    # A norm divides by what is read, of a query nearly at right angles to its key almost nothing: with 1e-6 and AVX2
    # gradients in fp32 are 1.2e-5 of their norm apart. With 1e-4 those of decays are so small that theirs are off.
    ours = _layer({"norm_epsilon": 1e-5, **changes})
    model = {"linear_conv_kernel_dim": 4, **DELTA, **changes}
    sizes = {name: value for name, value in model.items() if name.startswith("linear_") and "freq" not in name}
    sizes |= {"hidden_size": 64, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(layer_types=["linear_attention"], **sizes), 0)
    described = ours.described
    heads, convolved = described.key_heads, sum(described.sections[:4])
    columns = described.key_size, described.key_size, described.per_key * described.value_size

    def arranged(of_projection: Any, of_convolution: Any) -> list[torch.Tensor]:
        """Ours as theirs: key heads one after another in the projections, but not in the convolution."""
        rows = of_projection.view(heads, -1, 64)
        parts = of_convolution.view(heads, -1, of_convolution.size(-1)).split(columns, dim=1)
        channels = torch.cat([part.flatten(0, 1) for part in parts])[:, None]
        return [rows[:, :convolved].flatten(0, 1), rows[:, convolved:].flatten(0, 1), channels]

    of_decays = [(theirs.dt_bias, ours.dt_bias), (theirs.A_log, ours.A_log)]
    pairs = [*of_decays, (theirs.norm.weight, ours.out_norm.weight), (theirs.out_proj.weight, ours.out_proj.weight)]
    divided = [theirs.in_proj_qkvz.weight, theirs.in_proj_ba.weight, theirs.conv1d.weight]
    with torch.no_grad():
        weights = arranged(ours.in_proj.weight, ours.conv1d.weight)
        for parameter, value in [*((one, other) for one, other in pairs), *zip(divided, weights, strict=True)]:
            parameter.copy_(value)
    x, weight = torch.randn(150, 3, 64), torch.randn(150, 3, 64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    found, expected = ours(inputs[0])[0], theirs(inputs[1].transpose(0, 1)).transpose(0, 1)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5
    for output in (found, expected):
        (output * weight).sum().backward()
    gradients = [(inputs[1].grad, inputs[0].grad), *((one.grad, other.grad) for one, other in pairs[2:])]
    by_rows = arranged(ours.in_proj.weight.grad, ours.conv1d.weight.grad)
    gradients += list(zip((one.grad for one in divided), by_rows, strict=True))
    # Of a decay the terms of a gradient cancel: theirs, in fp32, may be off by 2e-5 of its norm, so that ours in fp64
    # is what both are compared with.
    our_own = [other.grad.clone() for _, other in of_decays]
    wide = ours.double()
    wide.zero_grad()
    (wide(x.double())[0] * weight).sum().backward()
    for (their_own, one), own in zip(of_decays, our_own, strict=True):
        gradients.append((one.grad, own))
        assert their_own.grad is not None
        assert (their_own.grad - one.grad).norm() <= 1e-4 * one.grad.norm()
    for one, other in gradients:
        assert one is not None
        assert other is not None
        assert (one - other).norm() <= 1e-5 * one.norm()


@pytest.mark.parametrize("changes", [KDA, {**KDA, "linear_num_key_heads": 1, "linear_num_value_heads": 1}], ids=str)
@pytest.mark.parametrize("span", [compute.SPAN, 70])
def test_a_layer_with_decays_of_channels_is_that_of_transformers(
    changes: dict[str, Any], span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    monkeypatch.setattr(compute, "SPAN", span)
    ours = _layer(changes)
    described = ours.described
    heads, size = described.key_heads, described.key_size
    sizes: Any = {"linear_num_heads": heads, "linear_head_dim": size, "rms_norm_eps": 1e-6}
    settings = KimiLinearConfig(hidden_size=64, num_hidden_layers=1, layer_types=["linear_attention"], **sizes)
    theirs: Any = KimiLinearDeltaAttention(settings, 0)

    def of_heads(rows: torch.Tensor, sections: tuple[int, ...]) -> list[torch.Tensor]:
        parts = rows.view(heads, sum(sections), -1).split(sections, dim=1)
        return [part.flatten(0, 1) for part in parts]

    def arranged(of: Any) -> list[torch.Tensor]:
        """Ours, or their gradients, in the order of `divided`."""
        convolution = torch.cat(of_heads(of(ours.conv1d.weight), described.sections[:3]))[:, None]
        low = of(ours.gates_in_proj.weight).chunk(2)
        up = of(ours.decay_out_proj.weight), of(ours.gate_out_proj.weight)
        rest = of(ours.out_norm.weight), of(ours.out_proj.weight)
        decays = of(ours.dt_bias), of(ours.A_log).view(1, 1, -1, 1)
        return [*of_heads(of(ours.in_proj.weight), described.sections), convolution, *low, *up, *rest, *decays]

    gate, projections = theirs.forget_gate, (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.b_proj, theirs.conv1d)
    gates = (gate.f_a_proj, theirs.g_a_proj, gate.f_b_proj, theirs.g_b_proj, theirs.o_norm, theirs.o_proj)
    divided = [*(module.weight for module in (*projections, *gates)), gate.dt_bias, gate.A_log]
    with torch.no_grad():
        for parameter, value in zip(divided, arranged(lambda own: own), strict=True):
            parameter.copy_(value)
    x, weight = torch.randn(150, 3, 64), torch.randn(150, 3, 64)
    found, expected = ours(x)[0], theirs(x.transpose(0, 1)).transpose(0, 1)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5
    for output in (found, expected):
        (output * weight).sum().backward()
    own = arranged(lambda parameter: parameter.grad.clone())
    wide = ours.double()
    wide.zero_grad()
    (wide(x.double())[0] * weight).sum().backward()
    of_decay = theirs.forget_gate.A_log  # as above: theirs is further from fp64 than ours
    for parameter, one, exact in zip(divided, own, arranged(lambda parameter: parameter.grad), strict=True):
        assert (one - exact).norm() <= 1e-5 * exact.norm()
        assert parameter.grad is not None
        assert (parameter.grad - exact).norm() <= (1e-4 if parameter is of_decay else 1e-5) * exact.norm()


@pytest.mark.parametrize("changes", [{}, SHARED_KEYS], ids=str)
def test_documents_are_as_each_by_itself(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "SPAN", 40)
    assert_documents_are_as_each_by_itself(_layer(changes).double())


@pytest.mark.parametrize("changes", [{}, {"linear_conv_kernel_dim": 1}, ODD, SHARED_KEYS], ids=str)
def test_generation_goes_on_from_a_state_of_one_size(changes: dict[str, Any]) -> None:
    layer, sizes = _layer(changes).double(), []
    for cache in going_on(lambda x, _, cache: layer(x, packed_seq_params=cache)[0]):
        sizes.append([kept.shape for kept in cache._recurrent[1]])
        assert not cache._kept
    described = layer.described
    state = (1, 3, described.key_heads, described.per_key, described.key_size, described.value_size)
    tail = (1, described.kernel - 1, 3, described.key_heads, described.convolved_size // described.key_heads)
    assert sizes == [[tail, state]] * MORE


@pytest.mark.parametrize("changes", [{}, SHARED_KEYS], ids=str)
def test_what_is_kept_for_the_backward_pass_is_the_projection_and_a_state_for_each_span(
    changes: dict[str, Any],
) -> None:
    from tests.support.saved_bytes import bytes_held_for_backward

    layer = _layer(changes)
    held = []
    for length in (compute.SPAN, 2 * compute.SPAN, 4 * compute.SPAN):
        x = torch.randn(length, 1, 64)
        held.append(bytes_held_for_backward(lambda x=x: layer(x)[0], [*layer.parameters(), x]))
    described = layer.described
    of_span = 4 * compute.SPAN * (described.mixed_size + described.gates_size + described.context_size)
    of_state = 4 * described.value_heads * described.key_size * described.value_size
    tails = 4 * (described.kernel - 1) * described.convolved_size
    assert held == [spans * (of_span + of_state) + tails for spans in (1, 2, 4)]


def test_weights_begin_as_megatrons() -> None:
    [gpt], _ = build_small_model(small_config({**DELTA, "linear_num_key_heads": 64, "linear_num_value_heads": 512}))
    layer: Any = gpt.decoder.layers[0].self_attention
    decays = layer.A_log.exp()
    assert 1.0 <= decays.min() < 1.5
    assert 15.5 < decays.max() <= 16.0
    assert decays.mean().item() == pytest.approx(8.5, abs=0.5)
    assert layer.dt_bias.eq(1.0).all()
    assert layer.out_norm.weight.eq(1.0).all()
    assert layer.conv1d.weight.abs().max().item() == pytest.approx(0.5, rel=0.01)
    assert layer.conv1d.weight.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.05)
    assert layer.conv1d.weight[:, 0].std(dim=1).min() > 0.0, "each position has a weight of its own"
    groups.destroy()
    [gpt], _ = build_small_model(small_config({**DELTA, **KDA, "linear_key_head_dim": 128}))
    layer = gpt.decoder.layers[0].self_attention
    steps = torch.nn.functional.softplus(layer.dt_bias).log10()
    assert -3.0 <= steps.min() < -2.9
    assert -1.1 < steps.max() <= -1.0
    assert steps.mean().item() == pytest.approx(-2.0, abs=0.1)
    assert steps.std().item() == pytest.approx(2 / math.sqrt(12), rel=0.1)
    groups.destroy()
