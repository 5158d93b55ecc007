"""More layouts whose passes follow a table, against one process: initial weights, first gradients and the steps."""

import pytest

from megatron_ext.plugins.prove.cases import Case
from megatron_ext.plugins.prove.parity import Experiment, compare

V = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule zbv"
V4 = V.replace("size 2", "size 4")
LAYOUTS = {
    "gpipe": ("untied", 4, "--pipeline-model-parallel-size 4 --pipeline-schedule gpipe"),
    "zero bubble": ("tied", 4, "--pipeline-model-parallel-size 4 --pipeline-schedule interleaved-zero-bubble"),
    "four ranks": ("8 layers, tied", 4, V4),
    "TP2": ("learned positions, biases", 4, f"{V} --tensor-model-parallel-size 2"),
    "distributed optimizer": (
        "tied",
        4,
        f"{V} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "gradients added in products": ("untied", 2, f"{V} --gradient-accumulation-fusion --overlap-grad-reduce"),
    "loss and output layer in one": ("untied", 2, f"{V} --linear-cross-entropy"),
    "recomputed": (
        "untied",
        2,
        f"{V} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "uneven": ("tied", 2, f"{V} --pipeline-model-parallel-layout Et*2|(t|)*2L"),
    "MTP": ("one token ahead", 2, V),
    "MTP, untied": ("two tokens ahead", 2, V),
    "latents": ("latents", 2, V),
    "experts": (
        "experts",
        4,
        f"{V} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ),
    "packed": (
        "packed",
        4,
        f"{V.replace('zbv', 'dualpipe-v')} --context-parallel-size 2 --cp-comm-type all_gather",
    ),
}


@pytest.mark.slow  # the cases of docs/parity.md are part of every run
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_table_trains_what_one_process_trains(name: str, experiment: Experiment) -> None:
    model, ranks, flags = LAYOUTS[name]
    reference, other = experiment.reference(model), experiment.train(Case(name, model, ranks, tuple(flags.split())))
    assert compare(reference, other).problems() == []
    assert other.weight_hash == reference.weight_hash
