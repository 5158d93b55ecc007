"""What the optimizer's parameter groups decay is what the catalogue says, in every sharding scheme."""

import shlex

import pytest

from megatron_ext.verify.ranks import run_ranks
from tests.support.several_models import end_layout

BASE = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --eval-interval 0 "
)
LAYOUTS = {
    "DDP": "",
    "DDP, bf16": "--bf16",
    "distributed optimizer": "--use-distributed-optimizer --bf16",
    "in host memory": "--use-distributed-optimizer --bf16 --optimizer-cpu-offload",
    "FSDP2": "--use-torch-fsdp2",
    "FSDP2 in host memory": "--use-torch-fsdp2 --torch-fsdp2-cpu-offload",
    "ZeRO-3": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --bf16",
    "norms of queries and keys": "--qk-layernorm --apply-wd-to-qk-layernorm --use-distributed-optimizer",
    "experts": "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2",
}


def _decays(layouts: dict[str, str]) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """By layout, what a weight decay of 1 is for each parameter that this rank updates, and what the catalogue says."""
    from megatron_ext import device

    here = device.install("cpu")
    import torch

    from megatron_ext.model.names import by_expert, global_named_parameters
    from megatron_ext.optim.settings import set_rates
    from megatron_ext.parts.catalogue import parameters
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    found = {}
    for layout, flags in layouts.items():
        config = configure(shlex.split(BASE + flags)).config
        run = build_run(config, here)
        set_rates(run.optimizer, 1.0, 1.0)
        decays = {}
        with run.sharding.weights_in_place(run.chunks):
            names = {id(weight): name for name, weight in global_named_parameters(run.chunks)}
            for part in run.sharding.parts(run.optimizer):
                own = {id(main): group["weight_decay"] for group in part.core.param_groups for main in group["params"]}
                for weight, main in part.main_parameters():
                    shape = torch.empty(weight.shape, device="meta")
                    decays |= {name: own[id(main)] for name, _ in by_expert(names[id(weight)], shape)}
        kinds = ("q_layernorm", "k_layernorm") if "--apply-wd" in flags else ()
        found[layout] = (
            decays,
            {one.name: float(one.decay or any(kind in one.name for kind in kinds)) for one in parameters(config)},
        )
        end_layout()
    return found


@pytest.fixture(scope="module")
def decays() -> list[dict[str, tuple[dict[str, float], dict[str, float]]]]:
    """Of two ranks: with the distributed optimizer, a rank updates what its own shard has."""
    return run_ranks(2, _decays, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_decay_and_nothing_else(
    layout: str, decays: list[dict[str, tuple[dict[str, float], dict[str, float]]]]
) -> None:
    one, other = (of_rank[layout] for of_rank in decays)
    assert one[0] | other[0] == one[1]
    assert {0.0, 1.0} == set(one[1].values())
