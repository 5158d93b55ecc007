"""Lists the families of Hugging Face, and finds which of them a configuration is."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.derived.layer_patterns import read_pattern, read_window
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.stack import stack
from megatron_ext.plugins.families.family import Family, usual_values
from megatron_ext.plugins.families.flags import FamilyFlags
from megatron_ext.plugins.families.shared import pattern
from megatron_ext.registry import brought


def _of_files() -> dict[str, Family]:
    """Return the families of this folder's files, by model type."""
    package = __package__ or ""
    files = [f"{package}.{found.name}" for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    readers = (__name__, f"{package}.hf_config")  # of all families
    modules = [importlib.import_module(name) for name in files if name not in readers]
    families = [value for module in modules for value in vars(module).values() if isinstance(value, Family)]
    return {family.model_type: family for family in families}


class _Families(Mapping[str, Family]):
    """The families by model type, in alphabetical order, which is the one in which a configuration that fits several
    is given one, after those that are common. A family of other plugins or of a user's own code (`families=` of
    `megatron_ext.pretrain`) takes the place of the one of its type here."""

    def __init__(self) -> None:
        self._of_files = _of_files()

    def _all(self) -> dict[str, Family]:
        """Return all families.

        Raises:
            ConfigurationError: something that was brought as a family is none.
        """
        others = brought("families")
        for one in others:
            if not isinstance(one, Family):
                raise ConfigurationError(
                    f"families= has {one!r}, which is no Family (megatron_ext.plugins.families.family); docs/python.md "
                    "has an example"
                )
        families = self._of_files | {family.model_type: family for family in others}
        return {name: families[name] for name in sorted(families)}

    def __getitem__(self, model_type: str) -> Family:
        return self._all()[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


FAMILIES = _Families()
_UNNORMALIZED = "moe_router_unnormalized"


def family_of(config: Config) -> Family:
    """Return the family that the configuration is shape-equal to: of several, the one that --hf-model-type names.

    Raises:
        ConfigurationError: there is no such family; the message names the flags that stand in the way of the nearest
            one.
    """
    named = FAMILIES.get(flags_of(config.checkpoint, FamilyFlags).hf_model_type or "")
    if named is not None and not obstacles(config, named):
        return named
    found = {family.model_type: obstacles(config, family) for family in FAMILIES.values()}
    has = _has_experts(config)
    others = {name: family.has_experts != has and not family.may_be_dense for name, family in FAMILIES.items()}
    nearest = min(found, key=lambda name: (others[name], len(found[name]), _seldom(FAMILIES[name])))
    if found[nearest]:
        raise ConfigurationError(
            f"no Hugging Face family has this model's shape; the nearest is {nearest}, which has "
            f"{', '.join(found[nearest])}. Train with the flags of a family to export to it (docs/huggingface.md)"
        )
    return FAMILIES[nearest]


def _seldom(family: Family) -> int:
    return 0 if family.is_common else 2 if family.is_seldom else 1


def has_a_shape(config: Config) -> bool:
    """Return whether the sizes without which there is no model are given."""
    model = config.model
    sizes = (model.num_layers, model.hidden_size, model.num_attention_heads, config.data.vocab_size)
    return all(size is not None and size > 0 for size in sizes)


def written_as(config: Config) -> tuple[Family, Config]:
    """Return the family that the model is written as, and the configuration that the family can hold: without the
    depths of multi-token prediction, where no family has the model with them; and where a token has one expert, whose
    score is no share of a sum, with the flag that says so of several, where the family's config.json can.

    Raises:
        ConfigurationError: no family has the model without them either, as in `family_of`.
    """
    try:
        family = family_of(config)
    except ConfigurationError:
        if not config.model.mtp_num_layers:
            raise
        model = dataclasses.replace(config.model, mtp_num_layers=None, mtp_hybrid_override_pattern=None)
        model = dataclasses.replace(model, mtp_use_repeated_layer=False)
        config = dataclasses.replace(config, model=model)
        family = family_of(config)
    if _has_one_raw_score(config) and _UNNORMALIZED not in family.fixed:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, moe_router_unnormalized=True))
    return family, config


def obstacles(config: Config, family: Family) -> list[str]:
    """Return the flags that the family needs and the configuration does not have."""
    model = _normalized(config)
    wanted = {**family.fixed, **family.dependent_flags(model)}
    found = [
        _difference(name, value, getattr(model, name))
        for name, value in wanted.items()
        if getattr(model, name) != value
    ]
    if _has_one_raw_score(config) and family.dependent_flags(model).get(_UNNORMALIZED) is False:
        found.append("--moe-router-topk above 1")  # a share of one score is 1
    if model.is_sinkhorn and _has_experts(config):
        found.append("no --moe-router-load-balancing-type sinkhorn")
    if family.has_experts and not family.may_be_dense and not _has_experts(config):
        found.append("--num-experts")
    return found


def _has_one_raw_score(config: Config) -> bool:
    """Return whether a token has one expert, whose score is its weight and no share of a sum."""
    model = config.model
    return _has_experts(config) and model.moe_router_topk == 1 and model.moe_router_score_function != "softmax"


def _has_experts(config: Config) -> bool:
    return any(layer.experts is not None for layer, _ in stack(config).kinds)


def _normalized(config: Config) -> ModelConfig:
    """Return the model's values with switches that change nothing next to others put to one form."""
    model = config.model
    without = ("rotary_", "use_rope", "no_rope", "rope_type") if model.position_embedding_type != "rope" else ()
    without += ("moe_",) if model.num_experts is None else ()
    usual = {name: value for name, value in usual_values().items() if name.startswith(without)}
    model = dataclasses.replace(model, **usual)
    window, fixed = model.window_size, model.no_rope_freq
    has_experts = [layer.experts is not None for layer in stack(config)[: model.num_layers]]
    biases = model.has_qkv_bias, model.has_output_bias, model.has_mlp_bias
    everywhere = all(biases) or not model.disable_bias_linear
    return dataclasses.replace(
        model,
        disable_bias_linear=not everywhere,
        add_output_bias=model.add_output_bias and not everywhere,
        add_mlp_bias=model.add_mlp_bias and not everywhere,
        window_size=None if window is None or read_window(window) is None else window,
        moe_layer_freq=pattern(has_experts) if len({*has_experts}) > 1 and not model.hybrid_layer_pattern else None,
        no_rope_freq=None if fixed is None else pattern(read_pattern(fixed, model.num_layers, "the last")),
        add_qkv_bias=model.add_qkv_bias and not everywhere,
        group_query_attention=model.num_key_value_heads != model.num_attention_heads,
    )


def _difference(name: str, wanted: Any, given: Any) -> str:
    flag = flag_of(name)
    if wanted is None:
        return f"no {flag}"
    if isinstance(wanted, bool):
        return flag if wanted else f"no {flag}"
    wanted, given = (
        f"{one:g}" if isinstance(one, float) else " ".join(map(str, one)) if isinstance(one, tuple) else one
        for one in (wanted, given)
    )
    return f"{flag} {wanted} (not {given})"
