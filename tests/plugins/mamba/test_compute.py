"""A Mamba-2 layer against transformers' and against its recurrence, its documents each by itself, and generation."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.parallel import groups
from megatron_ext.plugins.gated_delta import compute
from tests.support.generated_texts import MORE, assert_documents_are_as_each_by_itself, going_on, recurrent_layer
from tests.support.small_models import MAMBA, build_small_model, small_config

ODD = {"mamba_state_dim": 5, "mamba_head_dim": 3, "mamba_num_groups": 1, "mamba_num_heads": 7}


def _layer(changes: dict[str, Any] | None = None) -> Any:
    return recurrent_layer({**MAMBA, **(changes or {})})


def _by_kind(layer: Any, rows: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return rows that lie group by group as transformers has them: x, B, C, z, time steps of all groups."""
    described = layer.described
    parts = rows.view(described.key_heads, -1, *rows.shape[1:]).split(described.sections[:count], dim=1)
    return [part.flatten(0, 1) for part in parts]


@pytest.mark.parametrize("changes", [{}, ODD, {"linear_conv_kernel_dim": 2}], ids=str)
@pytest.mark.parametrize("span", [compute.SPAN, 70])
def test_a_layer_is_that_of_transformers(changes: dict[str, Any], span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    monkeypatch.setattr(compute, "SPAN", span)
    ours = _layer(changes)
    described = ours.described
    settings = NemotronHConfig(
        **{"hidden_size": 64, "layers_block_type": ["linear_attention"], "ssm_state_size": described.key_size},
        **{"mamba_num_heads": described.value_heads, "mamba_head_dim": described.value_size, "time_step_min": 1e-20},
        **{"n_groups": described.key_heads, "conv_kernel": described.kernel, "layer_norm_epsilon": 1e-5},
    )
    theirs = NemotronHMamba2Mixer(settings, 0)

    def arranged(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, b, c, z, dt = _by_kind(ours, own["in_proj.weight"], 5)
        found = {name: own[name] for name in ("dt_bias", "A_log", "D", "out_proj.weight")}
        found |= {"in_proj.weight": torch.cat((z, x, b, c, dt)), "norm.weight": own["out_norm.weight"]}
        return found | {name: torch.cat(_by_kind(ours, own[name], 3)) for name in ("conv1d.weight", "conv1d.bias")}

    theirs.load_state_dict(arranged({name: one.detach() for name, one in ours.named_parameters()}))
    x, weight = torch.randn(150, 3, 64), torch.randn(150, 3, 64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    found, expected = ours(inputs[0])[0], theirs(inputs[1].transpose(0, 1)).transpose(0, 1)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5
    for output in (found, expected):
        (output * weight).sum().backward()
    gradients = arranged({name: one.grad for name, one in ours.named_parameters()})
    pairs = [
        (inputs[0].grad, inputs[1].grad),
        *((gradients[name], one.grad) for name, one in theirs.named_parameters()),
    ]
    for one, other in pairs:
        assert one is not None
        assert other is not None
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("changes", [{}, ODD], ids=str)
def test_chunks_are_the_recurrence(changes: dict[str, Any]) -> None:
    layer = _layer(changes).double()
    described, length = layer.described, 133
    hidden = torch.randn(length, 2, 64, dtype=torch.float64)
    x, b, c, z, step = _by_kind(layer, layer.in_proj.weight, 5)
    weights, biases = (_by_kind(layer, one, 3) for one in (layer.conv1d.weight, layer.conv1d.bias))
    convolved = []
    for rows, weight, bias in zip((x, b, c), weights, biases, strict=True):
        inputs = F.pad((hidden @ rows.T).permute(1, 2, 0), (described.kernel - 1, 0))
        convolved.append(F.silu(F.conv1d(inputs, weight, bias, groups=len(weight))).permute(2, 0, 1))
    heads, per_group = described.value_heads, described.per_key
    x_SBHP = convolved[0].unflatten(-1, (heads, -1))
    b_SBHN, c_SBHN = (
        one.unflatten(-1, (described.key_heads, -1)).repeat_interleave(per_group, dim=2) for one in convolved[1:]
    )
    dt_SBH = F.softplus(hidden @ step.T + layer.dt_bias)
    state = torch.zeros(2, heads, described.key_size, described.value_size, dtype=torch.float64)
    outputs = []
    for t in range(length):
        decay = (-layer.A_log.exp() * dt_SBH[t]).exp()[..., None, None]
        state = decay * state + (dt_SBH[t, ..., None] * b_SBHN[t])[..., None] * x_SBHP[t][:, :, None]
        outputs.append((state * c_SBHN[t, ..., None]).sum(-2) + layer.D[:, None] * x_SBHP[t])
    gated = torch.stack(outputs).flatten(2) * F.silu(hidden @ z.T)
    normed = F.rms_norm(
        gated.unflatten(-1, (described.key_heads, -1)), (gated.size(-1) // described.key_heads,), eps=1e-5
    )
    expected = (normed.flatten(2) * layer.out_norm.weight) @ layer.out_proj.weight.T
    assert (layer(hidden)[0] - expected).abs().max() < 1e-10


def test_documents_are_as_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "SPAN", 40)
    assert_documents_are_as_each_by_itself(_layer().double())


@pytest.mark.parametrize("changes", [{}, {"linear_conv_kernel_dim": 1}, ODD], ids=str)
def test_generation_goes_on_from_a_state_of_one_size(changes: dict[str, Any]) -> None:
    layer = _layer(changes).double()
    assert len([*going_on(lambda x, _, cache: layer(x, packed_seq_params=cache)[0])]) == MORE


def test_weights_begin_as_megatrons() -> None:
    [gpt], _ = build_small_model(small_config({**MAMBA, "mamba_num_groups": 64, "mamba_num_heads": 512}))
    layer: Any = gpt.decoder.layers[0].self_attention
    decays, steps = layer.A_log.exp(), F.softplus(layer.dt_bias).log10()
    assert 1.0 <= decays.min() < 1.5
    assert 15.5 < decays.max() <= 16.0
    assert steps.min().item() == pytest.approx(-3.0, abs=0.05)
    assert steps.max().item() == pytest.approx(-1.0, abs=0.05)
    assert steps.mean().item() == pytest.approx(-2.0, abs=0.1)
    assert layer.D.eq(1.0).all()
    assert layer.out_norm.weight.eq(1.0).all()
    for drawn in (layer.conv1d.weight, layer.conv1d.bias):
        assert drawn.abs().max().item() == pytest.approx(0.5, rel=0.01)
        assert drawn.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.05)
    groups.destroy()
