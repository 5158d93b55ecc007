"""Depths of multi-token prediction in layouts against one process: those that have letters, as Nemotron 3's, and those
that share one layer (--mtp-use-repeated-layer)."""

import pytest

from megatron_ext.plugins.prove import compared_layouts as layouts
from megatron_ext.plugins.prove.cases import Case
from megatron_ext.plugins.prove.compared_layouts import BY, EP2, FUSED, OVERLAP, PP2, PP2_VPP2, SPLIT, TP2_SP
from megatron_ext.plugins.prove.parity import Experiment, compare

# Of the second tier: tests/plugins/next_token/test_compute.py compares both with separate depths of a single layer.
pytestmark = pytest.mark.full

OF_LETTERS, OF_LETTERS_TIED = "hybrid, two tokens ahead", "tied hybrid, a token ahead"
UNTIED, TIED = "two tokens ahead by one layer", "three tokens ahead by one layer, tied"
EXPERTS = "two tokens ahead by one layer of experts"
LETTERS = "hybrid, two tokens ahead by layers of one depth"
_RECOMPUTED = f"{layouts.RECOMPUTED} 1 --recompute-method uniform"
_BLOCK = f"{layouts.RECOMPUTED} 1 --recompute-method block"
_SELECTIVE = "--recompute-granularity selective"
_MLP = f"{_SELECTIVE} --recompute-modules mlp layernorm"
LAYOUTS = {
    "letters: TP2 SP EP2": (OF_LETTERS, 4, f"{TP2_SP} {EP2}"),
    "letters: PP2, Et*4|mmL": (OF_LETTERS, 2, f"{PP2} {SPLIT} Et*4|mmL"),
    "letters: CP2 p2p": (OF_LETTERS, 2, f"{layouts.CP2} p2p"),
    "letters: ZeRO-3": (OF_LETTERS, 2, f"{layouts.MEGATRON_FSDP} optim_grads_params"),
    "letters: TP2 SP PP2 VPP2, tied": (OF_LETTERS_TIED, 4, f"{TP2_SP} {PP2_VPP2}"),
    "letters: TP2 SP FSDP2, tied": (OF_LETTERS_TIED, 4, f"{TP2_SP} {layouts.FSDP2}"),
    "letters: CP2 a2a, tied, packed": (f"{OF_LETTERS_TIED}, packed", 2, f"{layouts.CP2} a2a"),
    "TP2 SP": (UNTIED, 2, TP2_SP),
    "TP2 SP, tied": (TIED, 2, TP2_SP),
    "PP2": (UNTIED, 2, PP2),
    "PP2, tied": (TIED, 2, PP2),
    "PP2, Et*4|mmmL, tied": (TIED, 2, f"{PP2} {SPLIT} Et*4|mmmL"),
    "PP2 VPP2": (UNTIED, 2, PP2_VPP2),
    "TP2 SP PP2 VPP2, tied": (TIED, 4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 p2p": (UNTIED, 2, f"{layouts.CP2} p2p"),
    "CP2 a2a, tied": (TIED, 2, f"{layouts.CP2} a2a"),
    "DP2 distributed optimizer, overlap": (UNTIED, 2, OVERLAP),
    "PP2 DP2 distributed optimizer, overlap, tied": (TIED, 4, f"{PP2} {OVERLAP}"),
    "DP2 distributed optimizer, overlap, recomputation": (UNTIED, 2, f"{OVERLAP} {_RECOMPUTED}"),
    "PP2 DP2 distributed optimizer, overlap, recomputation, products add gradients, tied": (
        TIED,
        4,
        f"{PP2} {OVERLAP} {_RECOMPUTED} {FUSED}",
    ),
    "FSDP2": (UNTIED, 2, layouts.FSDP2),
    "TP2 SP FSDP2, tied": (TIED, 4, f"{TP2_SP} {layouts.FSDP2}"),
    "FSDP2, layers before them recomputed, tied": (TIED, 2, f"{layouts.FSDP2} {_BLOCK}"),
    "FSDP2, MLPs recomputed": (UNTIED, 2, f"{layouts.FSDP2} {_MLP}"),
    "ZeRO-2": (UNTIED, 2, f"{layouts.MEGATRON_FSDP} optim_grads"),
    "ZeRO-3": (UNTIED, 2, f"{layouts.MEGATRON_FSDP} optim_grads_params"),
    "ZeRO-3, tied": (TIED, 2, f"{layouts.MEGATRON_FSDP} optim_grads_params"),
    "ZeRO-3, layers before them recomputed": (UNTIED, 2, f"{layouts.MEGATRON_FSDP} optim_grads_params {_BLOCK}"),
    "ZeRO-1 of megatron-core's FSDP, recomputation": (UNTIED, 2, f"{layouts.MEGATRON_FSDP} optim {_RECOMPUTED}"),
    "one process, recomputation": (UNTIED, 1, _RECOMPUTED),
    "one process, selective recomputation, tied": (TIED, 1, _SELECTIVE),
    "one process, products add gradients": (UNTIED, 1, FUSED),
    "one process, products add gradients, tied": (TIED, 1, FUSED),
    "PP2, products add gradients, tied": (TIED, 2, f"{PP2} {FUSED}"),
    "PP2 zbv, products add gradients": (UNTIED, 2, f"{PP2_VPP2} {BY} zbv {FUSED}"),
    "PP2 zbv DP2 distributed optimizer, overlap, tied": (TIED, 4, f"{PP2_VPP2} {BY} zbv {OVERLAP}"),
    "PP2 zbv FSDP2": (UNTIED, 4, f"{PP2_VPP2} {BY} zbv {layouts.FSDP2}"),
    "PP2 zbv, recomputation, tied": (TIED, 2, f"{PP2_VPP2} {BY} zbv {_RECOMPUTED}"),
    "TP2 SP EP2, experts": (EXPERTS, 4, f"{TP2_SP} {EP2}"),
    "PP2 DP2, experts": (EXPERTS, 4, PP2),
    "TP2 SP EP2, letters": (LETTERS, 4, f"{TP2_SP} {EP2}"),
    "PP2, Et*4|mmL, letters": (LETTERS, 2, f"{PP2} {SPLIT} Et*4|mmL"),
    "one process, recomputation, experts": (EXPERTS, 1, _RECOMPUTED),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_process(name: str, first_steps: Experiment) -> None:
    model, ranks, flags = LAYOUTS[name]
    reference, other = first_steps.reference(model), first_steps.train(Case(name, model, ranks, tuple(flags.split())))
    assert compare(reference, other).problems() == []
    assert other.weight_hash == reference.weight_hash
