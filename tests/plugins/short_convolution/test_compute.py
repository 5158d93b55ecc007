"""A gated short convolution against transformers', its documents each by itself, and generation."""

import math
from typing import Any

import pytest
import torch

from megatron_ext.parallel import groups
from megatron_ext.plugins.short_convolution import compute
from tests.support.generated_texts import MORE, assert_documents_are_as_each_by_itself, going_on, recurrent_layer
from tests.support.saved_bytes import bytes_held_for_backward
from tests.support.small_models import CONVOLUTIONS, build_small_model, small_config

SHORT: dict[str, Any] = {**CONVOLUTIONS, "conv_l_cache": 3}
KINDS = [{}, {"conv_bias": True}, {"conv_l_cache": 1}, {"conv_l_cache": 8, "conv_bias": True}]


def _layer(changes: dict[str, Any] | None = None) -> Any:
    return recurrent_layer({**SHORT, **(changes or {})})


@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("span", [compute.SPAN, 70, 5])
def test_a_layer_is_that_of_transformers(changes: dict[str, Any], span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    monkeypatch.setattr(compute, "SPAN", span)
    ours = _layer(changes)
    kernel, bias = ours.described.kernel, ours.described.bias
    settings: Any = {"hidden_size": 64, "num_hidden_layers": 1, "layer_types": ["conv"]}
    theirs = Lfm2ShortConv(Lfm2Config(**settings, conv_L_cache=kernel, conv_bias=bias), 0)

    def arranged(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Ours as theirs: B, C and x of a channel lie next to each other here, there all of each."""
        found = {name.replace("conv1d", "conv"): one for name, one in own.items()}
        for name in (name for name in found if name.startswith("in_proj")):
            found[name] = found[name].unflatten(0, (-1, 3)).transpose(0, 1).flatten(0, 1)
        return found

    theirs.load_state_dict(arranged({name: one.detach() for name, one in ours.named_parameters()}))
    x, weight = torch.randn(150, 3, 64), torch.randn(150, 3, 64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    output, of_ours = ours(inputs[0])
    found = output if of_ours is None else output + of_ours
    expected = theirs(inputs[1].transpose(0, 1)).transpose(0, 1)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5
    for one in (found, expected):
        (one * weight).sum().backward()
    gradients = arranged({name: one.grad for name, one in ours.named_parameters()})
    pairs = [(inputs[0].grad, inputs[1].grad)]
    pairs += [(gradients[name], one.grad) for name, one in theirs.named_parameters()]
    assert len(pairs) == (7 if bias else 4)
    for one, other in pairs:
        assert one is not None
        assert other is not None
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("span", [40, 6])
def test_documents_are_as_each_by_itself(changes: dict[str, Any], span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "SPAN", span)
    assert_documents_are_as_each_by_itself(_layer(changes).double())


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_generation_goes_on_from_the_latest_inputs(changes: dict[str, Any]) -> None:
    layer, sizes = _layer(changes).double(), []
    for cache in going_on(lambda x, _, cache: layer(x, packed_seq_params=cache)[0]):
        inputs, _ = cache._recurrent[1]
        sizes.append(inputs.shape)
        assert not cache._kept
    assert sizes == [(1, layer.described.kernel - 1, 3, 1, 64)] * MORE


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_what_is_kept_for_the_backward_pass_is_the_projection_and_the_output(changes: dict[str, Any]) -> None:
    layer = _layer(changes)
    held = []
    for length in (compute.SPAN, 2 * compute.SPAN):
        x = torch.randn(length, 1, 64)
        held.append(bytes_held_for_backward(lambda x=x: layer(x)[0], [*layer.parameters(), x]))
    before = layer.described.kernel - 1
    assert held == [4 * 64 * (4 * spans * compute.SPAN + before) for spans in (1, 2)]


def test_weights_begin_as_torch_begins_a_convolution() -> None:
    [gpt], _ = build_small_model(small_config({**SHORT, "conv_bias": True, "hidden_size": 1024, "kv_channels": 256}))
    layer: Any = gpt.decoder.layers[0].self_attention
    assert layer.conv1d.weight.abs().max().item() == pytest.approx(1 / math.sqrt(3), rel=0.01)
    assert layer.conv1d.weight.std().item() == pytest.approx(1 / 3, rel=0.05)
    assert layer.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.out_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    for module in (layer.conv1d, layer.in_proj, layer.out_proj):
        assert module.bias.eq(0.0).all()
    groups.destroy()
