"""Holds what families with experts have in common: DeepSeek's mixture (experts chosen from groups, weights that are
scaled, shared experts of a multiple of an expert's width, first layers without experts), and Qwen's layers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.derived.layer_patterns import read_pattern
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families.family import EXPERT_BIAS, usual_values
from megatron_ext.plugins.families.reading import Reading, refuse_others
from megatron_ext.plugins.families.shared import (
    DECODER_NAMES,
    Keys,
    expert_json,
    expert_names,
    expert_values,
    experts,
    keys,
    layer_numbers,
    pattern,
)


def mixture_names(mixture: str, **of_expert: str) -> dict[str, tuple[str, ...]]:
    """Return Hugging Face's names for each of our names of a decoder layer, as `expert_names`, with shared experts and
    the bias by which experts are chosen.

    Args:
        mixture: the layer's module that has router and experts, for example `mlp`.
        of_expert: names of an expert's matrices: `gate`, `up` and `down`.
    """
    shared = f"{mixture}.shared_experts"
    return {
        **expert_names(mixture, **of_expert),
        "mlp.shared_experts.linear_fc1": (f"{shared}.gate_proj", f"{shared}.up_proj"),
        "mlp.shared_experts.linear_fc2": (f"{shared}.down_proj",),
        EXPERT_BIAS: (f"{mixture}.gate.e_score_correction_bias",),
    }


MIXTURE_NAMES = {**DECODER_NAMES, **mixture_names("mlp", gate="gate_proj", up="up_proj", down="down_proj")}
"""Names of a decoder whose layers have an MLP or experts with shared ones, and a bias by which they are chosen."""

BIASED_SIGMOID: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
"""How experts are chosen without a loss: DeepSeek-V3, section 2.1.2 (Liu et al. 2024, arXiv:2412.19437)."""

UNNORMALIZED = "moe_router_unnormalized"
"""Flag of weights of experts that are not divided by their sum."""

_KEYS = (
    *("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group"),
    *("norm_topk_prob", "routed_scaling_factor"),
)
_FLAGS = (
    *("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_layer_freq"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores", "moe_router_topk_scaling_factor"),
    "moe_shared_expert_intermediate_size",
    UNNORMALIZED,
)
_OF_TRAINING = ("aux_loss_alpha", "seq_aux", "ep_size", "topk_method", "scoring_func", "moe_layer_freq")


@dataclass(frozen=True)
class Mixture:
    """The mixture of one family."""

    flags: Mapping[str, Any]
    """Values of our flags that say how experts are chosen."""

    group_scores: int
    """Best scores of a group that are added up to choose groups."""

    normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""

    without: tuple[str, ...] = ()
    """Keys that the class does not have."""

    def values(self, reading: Reading, first: int | None = None) -> dict[str, Any]:
        """Return the values of our flags, all usual ones where no layer has experts.

        Args:
            first: the first layer with experts, where `first_k_dense_replace` does not say it.
        """
        reading.understand(*_OF_TRAINING)
        # Modules after the model, which predict further tokens: as transformers, which leaves out their weights.
        reading.get("num_nextn_predict_layers")
        if first is None:
            first = reading.integer("first_k_dense_replace", 0, least=0)
        if first >= reading.integer("num_hidden_layers"):
            for key in _KEYS:  # under each of its names
                reading.get(key)
            return {name: usual_values()[name] for name in (*_FLAGS, *self.flags)}
        refuse_others(reading, {key: 1 for key in ("n_group", "topk_group") if key in self.without})
        count, width = reading.integer("n_routed_experts"), reading.integer("moe_intermediate_size")
        sums = self.normalized and reading.boolean("norm_topk_prob", True)
        values = {**expert_values(reading, count, width, normalized=sums), **self.flags}
        values |= {"moe_router_pre_softmax": not self.normalized}
        # The weight of one expert is never divided.
        values[UNNORMALIZED] = self.normalized and not sums and values["moe_router_topk"] > 1
        groups, chosen = reading.integer("n_group", 1), reading.integer("topk_group", 1)
        if count % groups and reading.is_readable:
            reading.problems.append(f"n_group {groups} does not divide the {count} experts")
        least = -(-values["moe_router_topk"] * groups // count)
        if groups > 1 and not count % groups and not least <= chosen <= groups and reading.is_readable:
            reading.problems.append(
                f"topk_group {chosen} of n_group {groups}: they need experts for num_experts_per_tok "
                f"{values['moe_router_topk']}, {count // groups} in each"
            )
        scale, shared = reading.number("routed_scaling_factor", 1.0), reading.integer("n_shared_experts", 0, least=0)
        values |= {
            "moe_shared_expert_intermediate_size": shared * width or None,
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": chosen if groups > 1 else None,
            "moe_router_group_scores": self._scores(values["moe_router_topk"], chosen if groups > 1 else None),
            "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
        }
        if not self.normalized or "norm_topk_prob" in self.without:
            words = "only true is supported" if self.normalized else "which transformers does not read; leave it out"
            reading.refuse_unless("norm_topk_prob", self.normalized, self.normalized, words)
        mixtures = [number >= first for number in layer_numbers(reading)]
        return {**values, "moe_layer_freq": None if all(mixtures) else pattern(mixtures)}

    def dependent_flags(self, model: ModelConfig) -> dict[str, Any]:
        """Return the flags that follow from other values of a model with experts (`Family.dependent_flags`)."""
        if model.num_experts is None:
            return {}
        return {
            **self.flags,
            **consecutive_mixtures(model, to_the_end=True),
            "moe_router_group_scores": self._scores(model.moe_router_topk, model.moe_router_group_topk),
            "moe_router_pre_softmax": not self.normalized,
            **({UNNORMALIZED: False} if not self.normalized or "norm_topk_prob" in self.without else {}),
        }

    def json(self, config: Config) -> dict[str, Any]:
        """Return the content of `config.json`."""
        model = config.model
        has = [layer.experts is not None for layer in layers(config)]
        first = {"first_k_dense_replace": has.index(True) if True in has else len(has)}
        if model.num_experts is None:
            return first
        content = {
            **first,
            "n_routed_experts": model.num_experts,
            "n_shared_experts": shared_experts(model),
            "moe_intermediate_size": model.expert_ffn_hidden_size,
            "num_experts_per_tok": model.moe_router_topk,
            "norm_topk_prob": self.normalized and not model.moe_router_unnormalized,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "n_group": model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
        }
        return {key: value for key, value in content.items() if key not in self.without}

    @property
    def typed_keys(self) -> Keys:
        """The keys of `config.json` in both directions with `mlp_layer_types`; without it, one layer has no experts."""
        return (
            lambda reading: self.values(reading, typed_mixtures(reading, 1)),
            lambda config: {**self.json(config), **typed_json(config)},
        )

    @property
    def keys(self) -> Keys:
        """The keys of `config.json`, in both directions."""
        return self.values, self.json

    def _scores(self, topk: int, groups: int | None) -> int | None:
        """Return `group_scores` as a flag, where megatron-core takes another number."""
        return None if groups is None or topk // groups == self.group_scores else self.group_scores


V3_MIXTURE = Mixture(BIASED_SIGMOID, group_scores=2, normalized=True)
"""DeepSeek-V3's."""

MLP_KINDS = ("dense", "sparse")
"""Values of `mlp_layer_types`: an MLP, and experts."""


def typed_json(config: Config) -> dict[str, Any]:
    """Return `mlp_layer_types`."""
    held = layers(config)[: config.model.num_layers]
    return {"mlp_layer_types": [MLP_KINDS[layer.experts is not None] for layer in held]}


def typed_mixtures(reading: Reading, usual: int) -> int:
    """Return `first_typed`, and note a problem where `first_k_dense_replace` disagrees with it."""
    first = first_typed(reading, usual)
    by_kinds = f"but by mlp_layer_types, or its default, it is {first}"
    reading.refuse_unless("first_k_dense_replace", first, first, by_kinds)
    return first


def first_typed(reading: Reading, usual: int) -> int:
    """Return the first layer with experts by `mlp_layer_types`; `usual`: where it is missing."""
    numbers, kinds = layer_numbers(reading), reading.get("mlp_layer_types")
    first = usual if not isinstance(kinds, list) else kinds.count(MLP_KINDS[0])
    expected = [MLP_KINDS[number >= first] for number in numbers]
    words = f"but supported are dense layers first and sparse ones after them, of num_hidden_layers {len(numbers)}"
    reading.refuse_unless("mlp_layer_types", expected, expected, words)
    return first


def mixtures_by_kind(reading: Reading, usual: Sequence[bool]) -> dict[str, Any]:
    """Return which layers have experts by `mlp_layer_types`; `usual`: where it is missing."""
    kinds = reading.get("mlp_layer_types", [MLP_KINDS[one] for one in usual])
    known = isinstance(kinds, list) and len(kinds) == len(usual) and {*map(str, kinds)} <= {*MLP_KINDS}
    has = [one == MLP_KINDS[1] for one in kinds] if known else usual
    if not known or not any(has):
        reading.problems.append(
            f"mlp_layer_types is {json.dumps(kinds)[:80]}; supported is a list of num_hidden_layers {len(usual)} times "
            f"{' or '.join(MLP_KINDS)}, some of them {MLP_KINDS[1]}"
        )
    return {"moe_layer_freq": None if all(has) else pattern(has)}


def consecutive_mixtures(model: ModelConfig, *, to_the_end: bool) -> dict[str, Any]:
    """Return the flags by which the layers with experts follow each other, with `to_the_end` up to the last layer, and
    shared experts are as wide as a number of the others together (`Family.dependent_flags`)."""
    mixtures, width = model.moe_layer_freq, shared_experts(model) * model.expert_ffn_hidden_size
    if mixtures is not None:
        has = read_pattern(mixtures, model.num_layers, "the first")
        last = len(has) if to_the_end else len(has) - has[::-1].index(True)
        mixtures = pattern([has.index(True) <= number < last for number in range(len(has))])
    return {"moe_layer_freq": mixtures, "moe_shared_expert_intermediate_size": width or None}


def shared_experts(model: ModelConfig) -> int:
    """Return the number of shared experts of the width of the others."""
    return (model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_hidden_size


def _some_layers(reading: Reading) -> dict[str, Any]:
    """Return --moe-layer-freq, which layers have experts (None: all), from Qwen's decoder_sparse_step and
    mlp_only_layers."""
    step = reading.integer("decoder_sparse_step", 1)
    dense = reading.integers("mlp_only_layers", len(layer_numbers(reading)))
    mixtures = [(number + 1) % step == 0 and number not in dense for number in layer_numbers(reading)]
    if not any(mixtures) and reading.is_readable:
        reading.problems.append(f"decoder_sparse_step {step} and mlp_only_layers {dense} leave no layer with experts")
    return {"moe_layer_freq": None if all(mixtures) else pattern(mixtures)}


def _dense_layers(config: Config) -> dict[str, Any]:
    dense = [layer.number for layer in layers(config) if layer.experts is None]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def sigmoid_keys(count: str, width: str) -> Keys:
    """Return the keys of experts in every layer that are chosen by a sigmoid, whose weights are divided by their sum or
    not (`norm_topk_prob`)."""

    def values(reading: Reading) -> dict[str, Any]:
        sums = reading.boolean("norm_topk_prob", True)
        found = expert_values(reading, reading.integer(count), reading.integer(width), normalized=sums)
        return {**found, "moe_router_pre_softmax": False, UNNORMALIZED: not sums and found["moe_router_topk"] > 1}

    def content(config: Config) -> dict[str, Any]:
        model = config.model
        sizes = {count: model.num_experts, width: model.expert_ffn_hidden_size}
        return {**expert_json(config), **sizes, "norm_topk_prob": not model.moe_router_unnormalized}

    return values, content


AHEAD: Keys = (
    lambda reading: {"mtp_num_layers": reading.integer("num_nextn_predict_layers", 0, least=0) or None},
    lambda config: {"num_nextn_predict_layers": config.model.mtp_num_layers} if config.model.mtp_num_layers else {},
)
"""Depths of multi-token prediction, whose weights transformers leaves out."""

WHOLE_MIXTURE: Keys = experts("num_experts", "intermediate_size", "norm_topk_prob")
"""OLMoE's experts, which are in every layer."""

SPARSE_LAYERS: Keys = (_some_layers, _dense_layers)
"""Qwen's keys of the layers that have experts."""

SPARSE_MIXTURE: Keys = keys(SPARSE_LAYERS, experts("num_experts", "moe_intermediate_size", "norm_topk_prob"))
