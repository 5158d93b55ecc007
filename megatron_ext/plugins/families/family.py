"""What a family of Hugging Face consists of. Its file makes one `Family`, which `registry.py` finds there."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_ext.config.derived.attention_flags import LATENT_FLAGS, STRETCH_FLAGS
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families.reading import Reading

EXPERT_BIAS = "mlp.router.expert_bias"
"""Name, in a layer, of the bias by which experts are chosen."""


def _no_flags(_model: ModelConfig) -> dict[str, Any]:
    return {}


@functools.cache
def usual_values() -> dict[str, Any]:
    """Return the flags on which a model's weights, or what it computes from them, depend, with their defaults; without
    those that say more of another one, and the precision of a router."""
    fields = [one for one in dataclasses.fields(ModelConfig) if one.metadata["resume"] in ("shape", "function")]
    details = ("rope_scaling_", "moe_router_dtype", "no_position_embedding", "attention_temperature_step")
    details += (*LATENT_FLAGS, *STRETCH_FLAGS)
    return {one.name: one.default for one in fields if not one.name.startswith(details)}


class Sections(NamedTuple):
    """Says where the sections of a matrix (`Parameter.sections`), which repeat group by group, lie there."""

    counts: tuple[int, ...]
    """Number of sections in each of the tensors."""

    by_groups: bool
    """Whether those of a group lie together there as well, or each of all groups."""

    order: tuple[int, ...] = ()
    """Indices of the sections in the order in which they lie in the one tensor there; empty: as here."""


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
    """Module of ours (in a layer, without the layer's prefix) -> modules there whose rows it holds, in this order.
    One name for the fused QKV: queries, keys and values lie one above the other there. `{}` in the names of experts is
    the expert's index; without it, the tensor holds those of all experts. A parameter's whole name (`EXPERT_BIAS`) is
    mapped to a whole name. A family whose layers may have experts or none names the modules of both."""

    flags: Mapping[str, Any]
    """Values of our flags that every model of the family has. One that is neither here nor read is the usual one."""

    read: Callable[[Reading], dict[str, Any]]
    """Translates a `config.json` into values of our flags by field name, beyond `flags`. It adds what our model cannot
    be to the reading's problems."""

    write: Callable[[Config], dict[str, Any]]
    """Returns the content of `config.json` beyond what all families write."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for a key that is not in the file, where families differ or it is not None."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key -> another name that transformers takes for it."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Key as `read` and `write` name it -> the only name that the files have for it."""

    dropouts: tuple[str, ...] = ("attention_dropout",)
    """Keys of its rates of dropout, as transformers' class has them."""

    dependent_flags: Callable[[ModelConfig], Mapping[str, Any]] = _no_flags
    """Values of our flags that follow from other values of the model, in every model of the family."""

    dependent_names: Callable[[ModelConfig], Mapping[str, tuple[str, ...]]] = _no_flags
    """Names that take the place of those in `names` by other values of the model."""

    layers: str = "model.layers.{}."
    """Prefix of a layer's modules."""

    ahead: str = ""
    """Prefix of the layer of a depth of multi-token prediction where it is no layer after the last one; names of what
    is around it are then whole ones, and embedding and output layer not repeated."""

    halves: bool = False
    """Whether a layer there is two of ours, a mixer and what comes after it (--hybrid-layer-pattern)."""

    other_names: tuple[str, ...] = ()
    """Names in `config.json` of models that are the same."""

    may_be_dense: bool = False
    """Whether a model of a family that has names of experts may have none."""

    constants: Mapping[str, float] = field(default_factory=dict)
    """Names of numbers in every layer's files, without its prefix, that are no parameters and have one value."""

    vectors: str | None = None
    """Part of the names of vectors of which each is a row of a matrix here."""

    respelled: Mapping[str, str] = field(default_factory=dict)
    """Part of a tensor's name, as a regular expression, that some files have -> the usual one."""

    is_common: bool = False
    """Whether a model that fits several families is exported as one of this."""

    is_seldom: bool = False
    """Whether a model that fits another family, too, is exported as one of that."""

    qkv_by_groups: bool = False
    """Whether queries, keys and values of each group lie together in the fused QKV, as ours do."""

    qkv_blocks: int = 0
    """Number of blocks of a fused QKV there, each of which has the queries, the values and the keys of its heads; 0:
    there are none."""

    sections: Mapping[str, Sections] = field(default_factory=dict)
    """Modules of ours, besides the fused QKV, whose weight has sections that lie otherwise there."""

    transposed: frozenset[str] = frozenset()
    """Modules of ours whose weight lies transposed there, and whole names of vectors that are a matrix of one row."""

    alternating: frozenset[str] = frozenset()
    """Those of the transposed modules whose rows, gate and up projection, take turns there."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Whole names of vectors of ours, in a layer -> their shape there; -1 stands for the vector's size."""

    added: Mapping[str, float] = field(default_factory=dict)
    """Modules of ours -> what their weight has more than theirs: 1.0 for a norm whose file holds what it differs from
    1."""

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
