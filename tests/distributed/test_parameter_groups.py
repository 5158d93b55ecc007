"""Rate, weight decay and epsilon of the optimizer's groups are those of the catalogue's names, in every sharding
scheme."""

import shlex

import pytest
import torch

from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.model.names import by_expert, global_named_parameters
from megatron_ext.optim.settings import set_rates
from megatron_ext.parts.catalogue import OUTPUT_LAYER, WORD_EMBEDDINGS, parameters
from megatron_ext.parts.update_factors import factors
from tests.support.checkpoints import build
from tests.support.program import tiny
from tests.support.several_models import end_layout

BASE = tiny("--global-batch-size 2 --train-iters 2")
LAYOUTS = {
    "DDP": "",
    "DDP, bf16": "--bf16",
    "distributed optimizer": "--use-distributed-optimizer --bf16",
    "in host memory": "--use-distributed-optimizer --bf16 --optimizer-cpu-offload",
    "FSDP2": "--use-torch-fsdp2",
    "FSDP2 in host memory": "--use-torch-fsdp2 --torch-fsdp2-cpu-offload",
    "ZeRO-3": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --bf16",
    "experts": "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2",
}
GROUPS = (
    "--use-mup --mup-base-hidden-size 8 --mup-base-num-layers 1 --lr-group decoder.layers.1.*=0.5 "
    "--lr-group *norm*=0.25 --weight-decay-group *linear_fc1*=3"
)
LAYOUTS |= {f"{layout}, groups": f"{flags} {GROUPS}" for layout, flags in LAYOUTS.items()}
LAYOUTS |= {
    "Muon, groups": f"--optimizer muon --bf16 {GROUPS}",
    "averages in 16 bits, groups": f"--exp-avg-dtype bf16 --use-distributed-optimizer {GROUPS}",
    "norms of queries and keys": "--qk-layernorm --apply-wd-to-qk-layernorm --use-distributed-optimizer",
    "a rate of the ends": "--decoupled-lr 2e-3 --lr-group *=0.5",
    "the base itself": "--use-mup",
}

NORM, WORDS = "decoder.layers.0.input_layernorm.weight", "embedding.word_embeddings.weight"

Rates = dict[str, tuple[float, float, float]]
"""Learning rate, weight decay and epsilon by name of the parameter."""


def _rates(layouts: dict[str, str]) -> dict[str, tuple[Rates, Rates]]:
    """By layout, what a rate of 1 and a weight decay of 1 (of the ends 0.5) are for each parameter that this rank
    updates, and what the catalogue's factors make of them."""
    found = {}
    for layout, flags in layouts.items():
        run = build([*BASE, *shlex.split(flags)])
        config = run.config
        ends = None if config.optimizer.decoupled_lr is None else 0.5
        set_rates(run.optimizer, 1.0, 1.0, ends)
        rates = {}
        with run.sharding.weights_in_place(run.chunks):
            names = {id(weight): name for name, weight in global_named_parameters(run.chunks)}
            for part in run.sharding.parts(run.optimizer):
                own = {id(main): group for group in part.core.param_groups for main in group["params"]}
                for weight, main in part.main_parameters():
                    group, shape = own[id(main)], torch.empty(weight.shape, device="meta")
                    values = group["lr"], group["weight_decay"], group.get("eps", 0.0)
                    rates |= {name: values for name, _ in by_expert(names[id(weight)], shape)}
        expected = {}
        for one in parameters(config):
            of_one, updater = factors(config, one), traits_of(config.optimizer).updating(one.update)
            rate = of_one.rate * (ends or 1.0 if one.name in (WORD_EMBEDDINGS, OUTPUT_LAYER) else 1.0)
            epsilon = config.optimizer.adam_eps * of_one.epsilon if updater.name == "adam" else 0.0
            expected[one.name] = rate, of_one.weight_decay, epsilon
        found[layout] = rates, expected
        end_layout()
    return found


@pytest.fixture(scope="module")
def rates() -> list[dict[str, tuple[Rates, Rates]]]:
    """Of two ranks: with the distributed optimizer, a rank updates what its own shard has."""
    return run_ranks(2, _rates, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_those_of_the_catalogue(layout: str, rates: list[dict[str, tuple[Rates, Rates]]]) -> None:
    one, other = (of_rank[layout] for of_rank in rates)
    assert one[0] | other[0] == one[1]
    assert {decay for _, decay, _ in one[1].values()} > {0.0}
    matrix, norm, ends = one[1]["decoder.layers.1.self_attention.linear_qkv.weight"], one[1][NORM], one[1][WORDS]
    if "groups" in layout:
        muon = layout.startswith("Muon")
        assert matrix == ((0.5, 1.0, 0.0) if muon else (0.125, 4.0, 1e-8 / 8))
        assert norm == (0.25, 0.0, 1e-8 / 8)
        assert ends == (1.0, 1.0, 1e-8 / 4)
    elif layout == "a rate of the ends":
        assert (matrix[0], norm[0], ends[0]) == (0.5, 0.5, 0.25)
    else:
        assert (matrix, norm, ends) == ((1.0, 1.0, 1e-8), (1.0, 0.0, 1e-8), (1.0, 1.0, 1e-8))
    if layout == "norms of queries and keys":
        assert {name.rsplit(".", 2)[1] for name, (_, decay, _) in one[1].items() if decay and "norm" in name} == {
            "q_layernorm",
            "k_layernorm",
        }
