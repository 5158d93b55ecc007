"""What a layer computes in which order: norms on either side, branches, dropout, and what is computed again in the
backward pass."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.spec_utils import build_module

from megatron_ext.config.schema import Config
from megatron_ext.model.config import transformer_config
from megatron_ext.parts import layer as layer_module
from megatron_ext.parts.attention import compute as attention
from megatron_ext.parts.attention.cached import WholeSequences
from megatron_ext.parts.attention.compute import SDPAttention
from megatron_ext.parts.norm.compute import LayerNorm, RMSNorm
from megatron_ext.parts.spec import layer_spec
from megatron_ext.parts.stack import layers
from tests.support.small_models import LLAMA, build_small_model, small_config

LENGTH, ROWS = 16, 2


def _layer(config: Config, places: Any = "before", parallel: Any = None) -> Any:
    """The first layer of the model, with norms in these places, and weights that are no norm's initial ones."""
    [model], groups = build_small_model(config)
    made: Any
    spec = layer_spec(replace(layers(config)[0], norm_places=places, parallel=parallel), groups.tp)
    made = build_module(spec, config=transformer_config(config, "cpu"), layer_number=1, pg_collection=groups)
    generator = torch.Generator().manual_seed(7)
    for parameter in made.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return made, model.rotary_pos_emb(LENGTH) if config.model.position_embedding_type == "rope" else None


def _written_out(layer: Any, x: torch.Tensor, angles: Any, places: str, dropout: float) -> torch.Tensor:
    """x + after(part(before(x))), twice."""
    add: Any = get_bias_dropout_add(layer.training, False)
    for before, part, after in (
        ("input_layernorm", layer.self_attention, "post_self_attn_layernorm"),
        ("pre_mlp_layernorm", layer.mlp, "post_mlp_layernorm"),
    ):
        taken = x if places == "after" else getattr(layer, before)(x)
        output, bias = part(taken, None, angles) if part is layer.self_attention else part(taken)
        if places != "before":
            output, bias = getattr(layer, after)(output if bias is None else output + bias), None
        x = add((output, bias), x, dropout)
    return x


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["biases", "rotary"])
@pytest.mark.parametrize("places", ["before", "after", "both"])
def test_norms_stand_before_the_branches_or_after_or_both(places: str, model: dict[str, Any], again: bool) -> None:
    """Without training and in training with dropout, also with the MLP computed again: the same bits."""
    x = torch.randn(LENGTH, ROWS, 64, generator=torch.Generator().manual_seed(3))
    recompute: Any = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)} if again else {}
    layer, angles = _layer(small_config({**model, "hidden_dropout": 0.25}, training=recompute), places)
    assert layer.recompute_mlp == again
    for training in (False, True):
        layer.train(training)
        found = []
        for written_out in (False, True):
            torch.manual_seed(5)
            given = x.clone().requires_grad_()
            output = _written_out(layer, given, angles, places, 0.25) if written_out else layer(given, None, angles)[0]
            output.square().sum().backward()
            found.append([output.detach(), *(weight.grad for weight in layer.parameters())])
            layer.zero_grad()
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("again", [(), ("mlp",), ("layernorm",), ("mlp", "layernorm")], ids=", ".join)
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["biases", "rotary"])
@pytest.mark.parametrize("parallel", ["one-norm", "two-norms"])
def test_attention_and_mlp_read_the_same(parallel: str, model: dict[str, Any], again: tuple[str, ...]) -> None:
    """x + dropout(attention(norm(x)) + MLP(norm'(x))), without training and in training: the same bits."""
    recompute: Any = {"recompute_granularity": "selective", "recompute_modules": again} if again else {}
    config = small_config({**model, "hidden_dropout": 0.25}, training=recompute)
    layer, angles = _layer(config, parallel=parallel)
    x = torch.randn(LENGTH, ROWS, 64, generator=torch.Generator().manual_seed(3))
    for training in (False, True):
        layer.train(training)
        found = []
        for written_out in (False, True):
            torch.manual_seed(5)
            given = x.clone().requires_grad_()
            if written_out:
                normed = layer.input_layernorm(given)
                (attended, _), own = layer.self_attention(normed, None, angles), layer.pre_mlp_layernorm(given)
                expanded, _ = layer.mlp(normed if parallel == "one-norm" else own)
                add: Any = get_bias_dropout_add(training, False)
                output = add((attended + expanded, None), given, 0.25)
            else:
                output = layer(given, None, angles)[0]
            output.square().sum().backward()
            found.append([output.detach(), *(weight.grad for weight in layer.parameters())])
            layer.zero_grad()
        assert all(map(torch.equal, *found))
    assert ("pre_mlp_layernorm.weight" in dict(layer.named_parameters())) == (parallel == "two-norms")


@pytest.mark.parametrize(
    ("places", "parallel"),
    [("before", None), ("after", None), ("both", None), ("before", "one-norm"), ("before", "two-norms")],
)
def test_inference_goes_on_with_what_is_read(places: str, parallel: str | None) -> None:
    """In the last layer; in others all positions go on."""
    layer, angles = _layer(small_config({**LLAMA, "hidden_dropout": 0.25}), places, parallel)
    x = torch.randn(LENGTH, ROWS, 64, generator=torch.Generator().manual_seed(3))
    wanted = torch.tensor([3, 31, 0])
    layer.eval()
    with torch.inference_mode():
        whole = layer(x.clone(), None, angles)[0].flatten(0, 1)
        for last, expected in ((1, whole[wanted][:, None]), (2, whole.view(LENGTH, ROWS, -1))):
            sequences = WholeSequences(wanted)
            sequences.begin(last)
            torch.testing.assert_close(layer(x.clone(), None, angles, sequences)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def sums_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Norms take sums as on a GPU, by torch's operations; names of the norms that did."""
    made: list[str] = []

    def taking_sums(kind: Any) -> None:
        plain = kind.forward

        def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            if residual is None:
                return plain(self, x)
            made.append(self.name)
            return plain(self, x + residual), x + residual

        monkeypatch.setattr(kind, "forward", forward)

    for kind in (LayerNorm, RMSNorm):
        taking_sums(kind)
    monkeypatch.setattr(layer_module, "kernel_choice", SimpleNamespace(take_rows=lambda _x: True))
    monkeypatch.setattr(layer_module, "get_bias_dropout_add", lambda train, _fused: get_bias_dropout_add(train, False))
    return made


def _loss_and_gradients(model: Any) -> list[torch.Tensor]:
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 250
    model.zero_grad()
    losses = model(tokens, torch.arange(LENGTH).expand(ROWS, -1), None, labels=tokens)
    losses.sum().backward()
    return [losses.detach(), *(weight.grad.clone() for weight in model.parameters())]


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["biases", "rotary"])
def test_a_layer_normalizes_its_output_for_the_next_one(
    model: dict[str, Any], recompute: str | None, sums_by_one_kernel: list[str]
) -> None:
    """Three layers with the same bits as without. Full recomputation gives the next layer a copy, and reads not ahead;
    the recomputation of norms leaves them where they are."""
    how: dict[str, Any] = {
        None: {},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    }[recompute]
    [built], _ = build_small_model(small_config({**model, "num_layers": 3, "hidden_dropout": 0.0}, training=how))
    built.train()
    for name, module in built.named_modules():
        vars(module)["name"] = name
    expected = _loss_and_gradients(built)
    assert sums_by_one_kernel == [], "a CPU does not fuse"
    built.config.bias_dropout_fusion = True
    found = _loss_and_gradients(built)
    assert all(map(torch.equal, found, expected))
    norms = [f"decoder.layers.{n}.{kind}_layernorm" for n in range(3) for kind in ("input", "pre_mlp")]
    if recompute is None:
        assert sums_by_one_kernel == norms[1:], "all but the one that reads the embeddings"
    elif recompute == "full":
        assert {name.rsplit(".", 1)[1] for name in sums_by_one_kernel} == {"pre_mlp_layernorm"}
    else:
        assert sums_by_one_kernel == []


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_ranks_with_other_heads_draw_other_masks(sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the generator of divided regions; under sequence parallelism all of the block draws from it already."""
    forked: list[bool] = []

    class _Fork:
        def __enter__(self) -> None:
            forked.append(True)

        def __exit__(self, *_: object) -> None:
            """Nothing is put back."""

    tracker = SimpleNamespace(fork=_Fork)
    monkeypatch.setattr(attention, "tensor_parallel", SimpleNamespace(get_cuda_rng_tracker=lambda: tracker))
    config: Any = SimpleNamespace(context_parallel_size=1, attention_dropout=0.5, sequence_parallel=sequence_parallel)
    config.qk_clip = config.log_max_attention_logit = False
    core = SDPAttention(config, 1, attention.AttnMaskType.causal, "self")
    monkeypatch.setattr(core, "_whole", lambda query, key, value: value)
    heads = torch.zeros(1, 2, 3, 4)
    assert core.train().forward(heads, heads, heads).shape == (3, 1, 8)
    assert forked == ([] if sequence_parallel else [True])
    forked.clear()
    core.eval().forward(heads, heads, heads)
    core.dropout = 0.0
    core.train().forward(heads, heads, heads)
    assert forked == []
