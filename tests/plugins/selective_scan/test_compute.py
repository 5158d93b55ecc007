"""A Mamba-1 layer against transformers' three classes, its documents each by itself, and generation."""

import math
from typing import Any

import pytest
import torch

from megatron_ext.parallel import groups
from megatron_ext.plugins.selective_scan import compute
from tests.support.generated_texts import MORE, assert_documents_are_as_each_by_itself, going_on, recurrent_layer
from tests.support.saved_bytes import bytes_held_for_backward
from tests.support.small_models import SCAN, build_small_model, small_config

KINDS: list[dict[str, Any]] = [
    {"scan_norm": "none"},
    {"scan_norm": "without-weights", "scan_bias": True, "scan_conv_kernel_dim": 3},
    {"scan_norm": "with-weights", "no_scan_conv_bias": True, "scan_norm_epsilon": 1e-3},
    {"scan_norm": "none", "scan_conv_kernel_dim": 1},
]


def _layer(changes: dict[str, Any] | None = None) -> Any:
    return recurrent_layer({**SCAN, **(changes or {})})


def _theirs(described: Any) -> Any:
    """The mixer of the class of transformers that has the norms of ours."""
    from transformers import FalconMambaConfig, JambaConfig, MambaConfig
    from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer
    from transformers.models.mamba.modeling_mamba import MambaMixer

    if described.norm == "with-weights":
        settings: Any = {
            **{"hidden_size": 64, "num_attention_heads": 4, "mamba_d_state": described.state_size},
            **{"mamba_d_conv": described.kernel, "mamba_dt_rank": described.rank, "mamba_proj_bias": described.bias},
            **{"mamba_conv_bias": described.conv_bias, "rms_norm_eps": described.epsilon, "num_hidden_layers": 8},
        }
        return JambaMambaMixer(JambaConfig(**settings), 0)
    settings = {
        **{"hidden_size": 64, "num_hidden_layers": 1, "state_size": described.state_size},
        **{"conv_kernel": described.kernel, "time_step_rank": described.rank, "use_bias": described.bias},
        **{"use_conv_bias": described.conv_bias, "expand": 2},
    }
    if described.norm == "none":
        return MambaMixer(MambaConfig(**settings), 0)
    return FalconMambaMixer(  # which asks for norms before it has them, if it is to begin its weights
        FalconMambaConfig(**settings, mixer_rms_eps=described.epsilon), 0, initialize_mixer_weights=False
    )


def _arranged(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ours as theirs: x and z of a channel lie next to each other here, there all of each."""
    found = {name.replace("_norm.", "_layernorm."): one for name, one in own.items()}
    for name in (name for name in found if name.startswith("in_proj")):
        found[name] = found[name].unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
    return found


@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("span", [compute.SPAN, 70, 5])
def test_a_layer_is_that_of_transformers(changes: dict[str, Any], span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "SPAN", span)
    ours = _layer({**changes, "scan_channels": 128})
    theirs = _theirs(ours.described)
    theirs.load_state_dict(_arranged({name: one.detach() for name, one in ours.named_parameters()}))
    x, weight = torch.randn(150, 3, 64), torch.randn(150, 3, 64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    output, bias = ours(inputs[0])
    found = output if bias is None else output + bias
    expected = theirs(inputs[1].transpose(0, 1)).transpose(0, 1)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5
    for one in (found, expected):
        (one * weight).sum().backward()
    gradients = _arranged({name: one.grad for name, one in ours.named_parameters()})
    pairs = [(inputs[0].grad, inputs[1].grad)]
    pairs += [(gradients.pop(name), one.grad) for name, one in theirs.named_parameters()]
    assert not gradients
    for one, other in pairs:
        assert one is not None
        assert other is not None
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65])
def test_a_recurrence_is_that_of_one_position_after_another(length: int) -> None:
    decay = torch.rand(length, 2, 3, dtype=torch.float64, requires_grad=True)
    added = torch.randn(length, 2, 3, dtype=torch.float64, requires_grad=True)
    found: Any = compute.LinearRecurrence.apply(decay, added)
    state, expected = torch.zeros(2, 3, dtype=torch.float64), []
    for a, b in zip(decay.unbind(), added.unbind(), strict=True):
        state = a * state + b
        expected.append(state)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-12, rtol=1e-12)
    weight = torch.randn_like(found)
    ours = torch.autograd.grad((found * weight).sum(), (decay, added))
    theirs = torch.autograd.grad((torch.stack(expected) * weight).sum(), (decay, added))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("span", [40, 6])
def test_documents_are_as_each_by_itself(changes: dict[str, Any], span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "SPAN", span)
    assert_documents_are_as_each_by_itself(_layer(changes).double())


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_generation_goes_on_from_inputs_and_state(changes: dict[str, Any]) -> None:
    layer, sizes = _layer(changes).double(), []
    for cache in going_on(lambda x, _, cache: layer(x, packed_seq_params=cache)[0]):
        inputs, state = cache._recurrent[1]
        sizes.append((inputs.shape, state.shape))
        assert not cache._kept
    assert sizes == [((1, layer.described.kernel - 1, 3, 1, 40), (1, 3, 40, 6, 1))] * MORE


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_what_is_kept_for_the_backward_pass_has_no_state_of_each_position(changes: dict[str, Any]) -> None:
    layer = _layer(changes)
    norms, kernel = layer.described.norm != "none", layer.described.kernel
    held = []
    for spans in (1, 3):
        x = torch.randn(spans * compute.SPAN, 1, 64)
        held.append(bytes_held_for_backward(lambda x=x: layer(x)[0], [*layer.parameters(), x]))
    of_position, of_span, once = 4 * 40 + (1 + norms) * (3 + 2 * 6), 40 * 6, (kernel - 1) * 40
    assert held == [4 * (spans * (compute.SPAN * of_position + of_span) + once) for spans in (1, 3)]


def test_weights_begin_as_in_the_papers_code() -> None:
    [gpt], _ = build_small_model(small_config({**SCAN, "hidden_size": 1024, "kv_channels": 256, "scan_channels": 2048}))
    layer: Any = gpt.decoder.layers[0].self_attention
    assert torch.equal(layer.A_log, torch.arange(1.0, 7.0).log().expand(2048, 6))
    assert layer.D.eq(1.0).all()
    steps = torch.nn.functional.softplus(layer.dt_proj.bias)
    assert 1e-3 <= steps.min().item() < 2e-3
    assert 0.05 < steps.max().item() <= 0.1001
    assert layer.dt_proj.weight.abs().max().item() == pytest.approx(1 / math.sqrt(3), rel=0.01)
    assert layer.conv1d.weight.abs().max().item() == pytest.approx(1 / math.sqrt(4), rel=0.01)
    assert layer.x_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.dt_norm.weight.eq(1.0).all()
    groups.destroy()
