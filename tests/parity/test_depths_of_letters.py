"""Depths of multi-token prediction that have letters, as Nemotron 3's, in layouts against one process."""

import pytest

from megatron_ext.plugins.prove import compared_layouts as layouts
from megatron_ext.plugins.prove.cases import Case
from megatron_ext.plugins.prove.compared_layouts import EP2, PP2, PP2_VPP2, SPLIT, TP2_SP
from megatron_ext.plugins.prove.parity import Experiment, compare

# Of the second tier: tests/plugins/next_token/test_compute.py compares such a depth with one of a single layer.
pytestmark = pytest.mark.full

UNTIED, TIED = "hybrid, two tokens ahead", "tied hybrid, a token ahead"
LAYOUTS = {
    "TP2 SP EP2": (UNTIED, 4, f"{TP2_SP} {EP2}"),
    "PP2, Et*4|mmL": (UNTIED, 2, f"{PP2} {SPLIT} Et*4|mmL"),
    "CP2 p2p": (UNTIED, 2, f"{layouts.CP2} p2p"),
    "ZeRO-3": (UNTIED, 2, f"{layouts.MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP PP2 VPP2, tied": (TIED, 4, f"{TP2_SP} {PP2_VPP2}"),
    "TP2 SP FSDP2, tied": (TIED, 4, f"{TP2_SP} {layouts.FSDP2}"),
    "CP2 a2a, tied, packed": (f"{TIED}, packed", 2, f"{layouts.CP2} a2a"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_process(name: str, first_steps: Experiment) -> None:
    model, ranks, flags = LAYOUTS[name]
    reference, other = first_steps.reference(model), first_steps.train(Case(name, model, ranks, tuple(flags.split())))
    assert compare(reference, other).problems() == []
    assert other.weight_hash == reference.weight_hash
