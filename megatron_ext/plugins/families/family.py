"""Describes a family of Hugging Face models. A family's file makes one `Family`, which `registry.py` finds in it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megatron_ext.config.derived.attention_flags import LATENT_FLAGS, STRETCH_FLAGS
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families.reading import Reading

EXPERT_BIAS = "mlp.router.expert_bias"
"""Name, in a layer, of the bias by which experts are chosen."""


def _no_flags(_model: ModelConfig) -> dict[str, Any]:
    return {}


@functools.cache
def usual_values() -> dict[str, Any]:
    """Return the flags on which a model's weights or its function depend, with their defaults, except flags that give
    details of another flag, and the router's precision."""
    fields = [one for one in dataclasses.fields(ModelConfig) if one.metadata["resume"] in ("shape", "function")]
    details = ("rope_scaling_", "moe_router_dtype", "no_position_embedding", "attention_temperature_step")
    details += (*LATENT_FLAGS, *STRETCH_FLAGS)
    return {one.name: one.default for one in fields if not one.name.startswith(details)}


class Sections(NamedTuple):
    """Says where the sections of a matrix (`Parameter.sections`), which repeat group by group in ours, lie in the
    Hugging Face tensors."""

    counts: tuple[int, ...]
    """Number of sections in each of the Hugging Face tensors."""

    by_groups: bool
    """Whether the Hugging Face tensor, too, holds group after group with all of its sections, instead of section after
    section with all groups."""

    order: tuple[int, ...] = ()
    """Indices of our sections in the order in which they lie in the one Hugging Face tensor; empty: our order."""


@dataclass(frozen=True)
class Family:
    """Says how one family names, arranges and divides the parameters that we have, and what its `config.json` says.

    Fused matrices need no code of their own: whoever moves tensors (`checkpoint/huggingface/`) copies ranges of rows,
    in either direction and in any slice (see `state_dict_mapping.py`).
    """

    model_type: str
    """Name of the family as in `config.json`."""

    architecture: str
    """The class of transformers, as in `config.json`."""

    names: Mapping[str, tuple[str, ...]]
    """Module of ours (in a layer, without the layer's prefix) -> Hugging Face modules whose rows it holds, in this
    order. One name for the fused QKV: queries, keys and values lie one above the other in one tensor. `{}` in the names
    of experts is the expert's index; without it, the tensor holds the matrices of all experts. A parameter's whole name
    (`EXPERT_BIAS`) is mapped to a whole name. A family whose layers may have experts or none names the modules of
    both."""

    flags: Mapping[str, Any]
    """Values of our flags that every model of the family has. One that is neither here nor read is the usual one."""

    read: Callable[[Reading], dict[str, Any]]
    """Translates a `config.json` into values of our flags by field name, beyond `flags`. It adds what our model cannot
    be to the reading's problems."""

    write: Callable[[Config], dict[str, Any]]
    """Returns the content of `config.json` beyond what all families write."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers takes for keys that are not in the file, where families differ or the value is not
    None."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key -> another name that transformers takes for it."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Key as `read` and `write` name it -> the only name that the files have for it."""

    dropouts: tuple[str, ...] = ("attention_dropout",)
    """Keys of its rates of dropout, as transformers' class has them."""

    dependent_flags: Callable[[ModelConfig], Mapping[str, Any]] = _no_flags
    """Values of our flags that follow from other values of the model, in every model of the family."""

    dependent_names: Callable[[ModelConfig], Mapping[str, tuple[str, ...]]] = _no_flags
    """Names that replace entries of `names`, by other values of the model."""

    layers: str = "model.layers.{}."
    """Prefix of a layer's modules."""

    ahead: str = ""
    """Prefix of the layer of a depth of multi-token prediction where it is no layer after the last one; the modules
    around it then have whole names, and embedding and output layer are not repeated."""

    halves: bool = False
    """Whether a Hugging Face layer is two of ours, a mixer and the MLP or experts after it (--hybrid-layer-pattern)."""

    other_names: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Names in `config.json` of models that are the same -> values that transformers takes for keys that are not in the
    file, where they differ from `defaults`."""

    may_be_dense: bool = False
    """Whether a model of a family that has names of experts may have none."""

    constants: Mapping[str, float] = field(default_factory=dict)
    """Names of numbers in every layer's files, without its prefix, that are no parameters and have one value."""

    vectors: str | None = None
    """Part of the names of Hugging Face vectors of which each is a row of one of our matrices."""

    respelled: Mapping[str, str] = field(default_factory=dict)
    """Part of a tensor's name, as a regular expression, that some files have -> the usual one."""

    is_common: bool = False
    """Whether a model that fits several families is exported as one of this."""

    is_seldom: bool = False
    """Whether a model that fits another family, too, is exported as a model of the other family."""

    qkv_by_groups: bool = False
    """Whether queries, keys and values of each group lie together in the fused QKV, as ours do."""

    qkv_blocks: int = 0
    """Number of blocks of the Hugging Face fused QKV, each of which has the queries, the values and the keys of its
    heads; 0: it has none."""

    rotates: Literal["as-ours", "backwards", "halves"] = "as-ours"
    """How its class rotates a head: as ours; backwards, which turns a head whose halves change places forwards; or, in
    latent attention, pairs of a channel of each half, where ours rotates neighbours."""

    sections: Mapping[str, Sections] = field(default_factory=dict)
    """Modules of ours, besides the fused QKV, whose weight has sections that lie in several Hugging Face tensors, or in
    another order."""

    transposed: frozenset[str] = frozenset()
    """Modules of ours whose weight is transposed in the Hugging Face tensor, and whole names of vectors that are a
    matrix of one row."""

    alternating: frozenset[str] = frozenset()
    """Transposed modules whose rows alternate between gate and up projection in the Hugging Face tensor."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Whole names of vectors of ours, in a layer -> shape of the Hugging Face tensor; -1 stands for the vector's
    size."""

    added: Mapping[str, float] = field(default_factory=dict)
    """Modules of ours -> number to add to the Hugging Face weight to get ours: 1.0 for a norm whose file holds the
    difference from 1."""

    def constants_of(self, config: Config) -> dict[str, float]:
        """Return `constants` by their whole names."""
        layers = map(self.layers.format, range(config.model.num_layers))
        return {f"{layer}{name}": value for layer in layers for name, value in self.constants.items()}

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts: all, unless `moe_layer_freq` is free."""
        return "mlp.router" in self.names

    @functools.cached_property
    def fixed(self) -> dict[str, Any]:
        """`flags`, and the usual value of each that its `config.json` cannot say."""
        said = self.read(Reading({}, self.defaults, self.aliases, self.renamed))
        return {name: value for name, value in usual_values().items() if name not in said} | dict(self.flags)
