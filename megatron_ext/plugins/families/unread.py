"""Finds the tensors of a family's files that no parameter of ours is read from, and says why they may be left out.

Files that hold more than `config.json` describes are of another model. A tensor is left out for a reason that stands
here, or has no place in the model and is refused.
"""

import re
from collections.abc import Collection, Iterator

from megatron_ext.config.schema import Config
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.state_dict_mapping import ParameterMapping, copies

_AHEAD = "depths of multi-token prediction that are not trained"
OTHER_PARTS = "not of the text model"
_REASONS = {
    "rotary frequencies, which config.json gives": re.compile(r"rotary_emb\.inv_freq$"),
    "causal masks": re.compile(r"\.(attn|attention)\.(masked_)?bias$"),
    OTHER_PARTS: re.compile(r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\."),
}
_AHEAD_NAME = re.compile(r"(^|\.)mtp(_\w+)?\.")
_OF_A_DEPTH = "eh_proj.weight"
"""Tensor that only a layer of multi-token prediction has: its projection of two tokens' states to one."""


def tied_head(config: Config, family: Family) -> str | None:
    """Return the name of the output layer that files may repeat, although it is the embedding; None where it is not."""
    tied = not config.model.untie_embeddings_and_output_weights
    return f"{family.names['output_layer'][0]}.weight" if tied else None


def unread(
    names: Collection[str], mappings: Collection[ParameterMapping], config: Config, family: Family
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the tensors that are left out by their reason, and those that have no place in the model.

    Args:
        names: all tensors of the files.
        mappings: `state_dict_mapping` of the model.
    """
    read = {span.tensor for one in mappings for span in one.ranges}
    read |= {*family.constants_of(config), *copies(config, family), tied_head(config, family) or ""}
    depths = tuple(_depths(names, config, family))
    left_out: dict[str, list[str]] = {}
    without_place = []
    for name in sorted(names):
        if name in read:
            continue
        reason = next((reason for reason, pattern in _REASONS.items() if pattern.search(name)), None)
        if name.startswith(depths) or (not config.model.mtp_num_layers and _AHEAD_NAME.search(name)):
            reason = _AHEAD
        if reason is None:
            without_place.append(name)
        else:
            left_out.setdefault(reason, []).append(name)
    return left_out, without_place


def _depths(names: Collection[str], config: Config, family: Family) -> Iterator[str]:
    """Yield the prefixes of the layers of multi-token prediction that lie after the layers of the model."""
    layer = config.model.num_layers + (config.model.mtp_num_layers or 0)
    while f"{family.layers.format(layer)}{_OF_A_DEPTH}" in names:
        yield family.layers.format(layer)
        layer += 1


def listed(names: Collection[str], most: int = 20) -> str:
    """Return the first names, and how many there are after them."""
    first, rest = [*names][:most], len(names) - most
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
