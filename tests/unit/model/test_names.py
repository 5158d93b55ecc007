"""Global names, and where a forward pass comes to a parameter, on stand-ins for a stage in the middle of a model."""

from typing import Any

import pytest
import torch

from megatron_ext.model.names import AFTER_ALL, by_expert, forward_place, global_named_parameters, is_of_an_expert
from megatron_ext.parts.catalogue import parameters
from megatron_ext.parts.stack import layers
from tests.support.small_models import LLAMA, OLMO2, small_config


class Chunk(torch.nn.Module):
    """Two layers of a chunk, which are layers 6 and 7 of the model; the second is a mixture with experts 4 and 5."""

    def __init__(self, *, tied: bool):
        super().__init__()
        self.share_embeddings_and_output_weights = tied
        layers = [self._layer(6, "mlp.linear_fc1.weight", "self_attention.linear_qkv.layer_norm_weight")]
        layers.append(self._layer(7, "mlp.experts.linear_fc1.weight", "mlp.linear_fc1.layer_norm_bias"))
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(layers)
        self.output_layer = torch.nn.Linear(2, 3, bias=False)

    @staticmethod
    def _layer(number: int, *names: str) -> torch.nn.Module:
        layer: Any = torch.nn.Module()
        layer.layer_number = number + 1
        for name in names:
            owner = layer
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, torch.nn.Parameter(torch.zeros(2, 3, 1)))
        if hasattr(layer.mlp, "experts"):
            object.__setattr__(layer.mlp.experts, "local_experts", range(4, 6))
        return layer


class Wrapper(torch.nn.Module):
    """Data parallelism, or 16-bit training."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_the_whole_model(tied: bool) -> None:
    """Whatever wraps a chunk; norms that lie inside the layer after them are found by their own names."""
    wrapped = Wrapper(Wrapper(Chunk(tied=tied)))
    names = [name for name, _ in global_named_parameters([wrapped])]
    assert names == [
        "decoder.layers.6.mlp.linear_fc1.weight",
        "decoder.layers.6.input_layernorm.weight",
        "decoder.layers.7.mlp.experts.4:6.linear_fc1.weight",
        "decoder.layers.7.pre_mlp_layernorm.bias",
        "embedding.word_embeddings.weight" if tied else "output_layer.weight",
    ]
    assert [is_of_an_expert(name) for name in names] == [False, False, True, False, False]


def test_stacked_matrices_are_those_of_single_experts() -> None:
    stacked = torch.arange(6.0).view(2, 3)
    found = list(by_expert("decoder.layers.7.mlp.experts.4:6.linear_fc1.weight", stacked))
    assert [name for name, _ in found] == [f"decoder.layers.7.mlp.experts.{n}.linear_fc1.weight" for n in (4, 5)]
    assert [matrix.tolist() for _, matrix in found] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    found[1][1].fill_(9.0)
    assert stacked[1].tolist() == [9.0] * 3, "a view"
    [(name, same)] = by_expert("decoder.layers.7.mlp.router.weight", stacked)
    assert (name, same is stacked) == ("decoder.layers.7.mlp.router.weight", True)


MIXTURE = {**LLAMA, "num_experts": 2, "moe_ffn_hidden_size": 24, "qk_layernorm": True}


@pytest.mark.parametrize("model", [{}, MIXTURE, OLMO2], ids=["GPT-2", "a mixture", "OLMo 2"])
def test_a_forward_pass_comes_to_parameters_in_this_order(model: dict[str, Any]) -> None:
    """Embeddings, layers with their norms where they stand, the final norm, the output layer, the loss."""
    weight = torch.nn.Parameter(torch.zeros(1))
    config = small_config({**model, "num_layers": 11})
    modules = [layer.modules for layer in layers(config)]
    places = {one.name: forward_place(one.name, weight, modules) for one in parameters(config)}
    groups = {name: place[0] for name, place in places.items()}
    for name, group in groups.items():
        if name.startswith("decoder.layers."):
            assert group == int(name.split(".")[2])
        else:
            assert (group == -1) == name.startswith("embedding.")
            assert group == -1 or group > 11
    of_layer = sorted((place, name.split(".", 3)[3]) for name, place in places.items() if groups[name] == 10)
    parts = list(dict.fromkeys(name.split(".")[-2] for _, name in of_layer))
    after = model is OLMO2
    norms = ["q_layernorm", "k_layernorm"] if model else []
    assert parts == [
        *([] if after else ["input_layernorm"]),
        "linear_qkv",
        *norms,
        "linear_proj",
        *(["post_self_attn_layernorm"] if after else ["pre_mlp_layernorm"]),
        *(["router"] if model is MIXTURE else []),
        *("linear_fc1", "linear_fc2"),
        *(["post_mlp_layernorm"] if after else []),
    ]
    ends = [place for name, place in places.items() if name.startswith(("decoder.final", "output"))]
    assert ends == sorted(ends)
    shared: Any = torch.nn.Parameter(torch.zeros(1))
    shared.shared = True
    tied = forward_place("embedding.word_embeddings.weight", shared, modules)
    assert max(places.values()) <= max(tied, *ends) < AFTER_ALL
    assert tied > places["decoder.final_layernorm.weight"]
