"""Granite with windows and experts: granite_swa with granitemoe's experts."""

from dataclasses import replace

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.granite_swa import with_windows
from megatron_ext.plugins.families.granitemoe import GRANITEMOE
from megatron_ext.plugins.families.granitemoeshared import SHARED_EXPERT, SHARED_EXPERT_NAMES

_MIXTURE = "block_sparse_moe"
_KEYS = (shared.decoder(biases="attention"), shared.LOCAL_EXPERTS, SHARED_EXPERT)
_FAMILY = with_windows(GRANITEMOE, "granitemoe_swa", "GraniteMoeSWAForCausalLM", *_KEYS)

GRANITEMOE_SWA = replace(
    _FAMILY,
    names={
        **{name: theirs for name, theirs in _FAMILY.names.items() if not name.startswith("mlp.")},
        "mlp.router": (f"{_MIXTURE}.router",),
        **{f"{ours}.weight": (f"{_MIXTURE}.{theirs}",) for ours, theirs in shared.STACKED_EXPERTS.items()},
        **SHARED_EXPERT_NAMES,
    },
    defaults={**GRANITEMOE.defaults, "sliding_window": 128},
    is_seldom=True,
)
