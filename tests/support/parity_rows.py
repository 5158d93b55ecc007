"""Which rows of docs/parity.md a run takes: tests/parity and tools/next_versions.sh."""

from megatron_ext.plugins.prove.cases import CASES, Case
from megatron_ext.plugins.prove.compared_models import MODELS
from tests.support.selection import choices_of, covering


def _choices(case: Case) -> set[str]:
    """Return what a case is made of; flags of its layout and of its model are told apart."""
    of_model = {f"model: {choice}" for choice in choices_of(MODELS[case.model])}
    return choices_of(" ".join(case.flags)) | of_model | {f"{case.world_size} ranks"}


RECOMPUTED = [name for name in CASES if name.startswith("one process, recompute")]
LAYOUTS = [name for name in CASES if name not in RECOMPUTED]
# What other cases of a plain run train as well, with the other model, on more ranks or together: left to --all.
REPEATED = {
    "TP4, OLMo-2",
    "TP2, tied",
    "TP2, untied",
    "TP4, tied",
    "TP4, untied",
    "TP2 SP, untied",
    "PP2, tied",
    "PP2, untied",
    "PP4, tied",
    "PP4, untied",
    "PP2 VPP2, tied",
    "PP2 VPP2, untied",
    "PP4 VPP2, untied",
    "DP2, tied",
    "DP4, tied",
    "DP4, untied",
    "DP2 distributed optimizer, tied",
    "DP2 distributed optimizer, untied",
    "DP2 distributed optimizer, overlap, tied",
    "DP2 distributed optimizer, overlap, untied",
    "TP2 SP PP2 VPP2 DP2 distributed optimizer, overlap, untied",
    "TP2 SP PP2, query and key norm, QKV bias",
}
# Where bf16 rounds by itself: sums over ranks, stages, chunks of a sequence, and shards of the optimizer. Of one model,
# whose two single processes serve all.
ONCE_IN_BF16 = {
    "TP2 SP, untied",
    "PP2 VPP2, untied",
    "DP2 distributed optimizer, overlap, untied",
    "CP2 p2p, untied",
}
assert CASES.keys() >= REPEATED | ONCE_IN_BF16
QUICK = [name for name in LAYOUTS if not CASES[name].slow and name not in REPEATED]
# Every flag of a layout and of a model once, on any number of ranks, the row that adds most first; the rest are of the
# second tier.
FIRST = covering({name: _choices(CASES[name]) for name in QUICK})
