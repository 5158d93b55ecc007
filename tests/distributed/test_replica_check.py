"""One flipped bit in one copy of a weight: found in the interval, on every rank, with rank and parameter named."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import flags_of
from megatron_ext.errors import NumericError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parallel.rows import local_part
from megatron_ext.plugins.silent_errors.flags import SilentErrorFlags
from megatron_ext.plugins.silent_errors.replicas import ReplicaCheck
from megatron_ext.train.trainer import Trainer
from tests.support.checkpoints import build
from tests.support.program import tiny
from tests.support.selection import marked
from tests.support.several_models import in_turn

# Of the second tier: tests/unit/train compares replicas.
pytestmark = pytest.mark.full

FLAGS = tiny("--global-batch-size 2 --train-iters 20")
THREE = "--global-batch-size 3"  # replicas
DP = "--check-weight-hash-across-dp-replicas-interval"
TP = "--check-replicated-weights-interval"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
EXPERTS = "decoder.layers.1.mlp.experts.2:4.linear_fc2.weight"  # those of expert-parallel rank 1
EMBEDDINGS = "embedding.word_embeddings.weight"
NORM = "decoder.layers.0.pre_mlp_layernorm.weight"


Found = tuple[str, int, int]
"""The text of the error, its exit code and the steps completed."""


def _train(flags: str, good_steps: int, damage: Callable[[Any], None]) -> Found:
    """Good steps, then damage, then steps until the error."""
    run = build([*FLAGS, *flags.split()])
    checks = flags_of(run.config.training, SilentErrorFlags)
    intervals = (checks.check_weight_hash_across_dp_replicas_interval, checks.check_replicated_weights_interval)
    trainer = Trainer(run, [ReplicaCheck(*intervals)])
    for _ in range(good_steps):
        trainer.step()
    damage(run)
    try:
        for _ in range(5):
            trainer.step()
    except NumericError as error:
        return str(error), error.exit_code, run.state.iteration
    return "nothing found", 0, run.state.iteration


def _flip(run: Any, wanted: str, index: int = -1) -> None:
    """Flip a low bit of one element: the weight stays finite and near what it was.

    Not the lowest one of fp32: where the next update moves the weight past a power of two, rounding takes that away.
    """
    for name, parameter in global_named_parameters(run.chunks):
        if name == wanted:
            integers, bit = {2: (torch.int16, 1), 4: (torch.int32, 1 << 12)}[parameter.element_size()]
            # .data, and not .detach(): behind the back of autograd, as a broken memory cell does it.
            local_part(parameter).data.view(-1)[index : index + 1 or None].view(integers).bitwise_xor_(bit)


def _flip_on_rank_1(run: Any) -> None:
    if run.rank == 1:
        _flip(run, FC1)


def _flip_on_rank_1_before_step_1000(run: Any) -> None:
    run.state.iteration = 999
    _flip_on_rank_1(run)


def _flip_in_the_next_forward_pass(run: Any) -> None:
    """Of rank 0, in the part that rank 1 owns: the next update would fetch it anew."""

    def flip(*_: object) -> None:
        if not flipped:
            flipped.append(True)
            _flip(run, FC1)

    flipped: list[bool] = []
    if run.rank == 0:
        run.chunks[-1].module.register_forward_hook(flip)


def _drift_on_tensor_parallel_rank_1(run: Any) -> None:
    """Alike on both data-parallel replicas, so that these still agree."""
    if run.groups.tp.rank() == 1:
        _flip(run, NORM)


def _flip_an_expert_on_rank_3(run: Any) -> None:
    if run.rank == 3:
        _flip(run, EXPERTS)


def _drift_on_the_last_stage(run: Any) -> None:
    """Alike on both data-parallel replicas, so that these still agree."""
    if run.is_last_stage:
        _flip(run, EMBEDDINGS)


def _nothing(run: Any) -> None:
    pass


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TP2_EP2 = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --disable-bias-linear "
    "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel"
)
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PP3 = "--pipeline-model-parallel-size 3 --num-layers 3 --use-distributed-optimizer --bf16"
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
Case = tuple[int, str, int, Callable[[Any], None]]
CASES: dict[str, Case] = {
    "three replicas": (3, f"{THREE} {DP} 4", 1, _flip_on_rank_1),
    "without a flag": (3, THREE, 1, _flip_on_rank_1_before_step_1000),
    "within a step": (2, f"{OVERLAP} --bf16 {DP} 1 {TP} 1", 2, _flip_in_the_next_forward_pass),
    "tensor parallel": (4, f"{TP2} --use-distributed-optimizer {DP} 1 {TP} 2", 4, _drift_on_tensor_parallel_rank_1),
    "experts": (4, f"{TP2_EP2} {DP} 1 {TP} 1", 3, _flip_an_expert_on_rank_3),
    "FSDP2": (4, f"{TP2} --use-torch-fsdp2 {TP} 1", 3, _drift_on_tensor_parallel_rank_1),
    "Megatron-FSDP": (4, f"{TP2} --use-megatron-fsdp {TP} 1", 3, _drift_on_tensor_parallel_rank_1),
    "tied embeddings": (6, f"{PP3} {DP} 1 {TP} 1", 4, _drift_on_the_last_stage),
    "nothing wrong": (4, f"{TP2_PP2} --hidden-dropout 0.1 {DP} 1 {TP} 1", 1, _nothing),
}
"""Ranks, flags, steps before the damage, and the damage."""

# Slow: FSDP2 has the same rows of weights.
SLOW = {"Megatron-FSDP"}


def _found(name: str) -> Found:
    return _train(*CASES[name][1:])


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Callable[[str], list[Found]]:
    """What each rank finds; all cases of as many ranks are trained by the same ones."""
    asked = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}  # pyright: ignore[reportAttributeAccessIssue]
    left_out = SLOW - asked

    @functools.cache
    def of_ranks(size: int) -> dict[str, list[Found]]:
        names = [name for name, case in CASES.items() if case[0] == size and name not in left_out]
        by_rank = run_ranks(size, in_turn, _found, names)
        return dict(zip(names, map(list, zip(*by_rank, strict=True)), strict=True))

    return lambda name: of_ranks(CASES[name][0])[name]


NO_MAJORITY = "do not agree, and no majority says who is right, in"
OF_REPLICAS = f"rank 1 differs from ranks 0, 2 in {FC1} (data-parallel replicas); found at iteration"
SAID: dict[str, tuple[list[str], int]] = {
    "three replicas": ([f"{OF_REPLICAS} 4", "At iteration 0 they were equal."], 3),
    # Compared every 1000 steps where no flag says so.
    "without a flag": ([f"{OF_REPLICAS} 1000"], 999),
    # In the step of the distributed optimizer in which it happens.
    "within a step": ([f"ranks 0, 1 {NO_MAJORITY} {FC1}", "At iteration 1 they were equal."], 2),
    # Replicas agree.
    "tensor parallel": (
        [f"ranks {ranks} {NO_MAJORITY} {NORM} (tensor-parallel copies)" for ranks in ("0, 1", "2, 3")],
        5,
    ),
    # TP2, EP2 and expert-data-parallel 2: ranks 1 and 3 hold the same experts, ranks 0 and 2 others.
    "experts": ([f"ranks 1, 3 {NO_MAJORITY} {EXPERTS} (data-"], 3),
    # In the rows that a rank keeps.
    "FSDP2": ([f"in {NORM} (tensor-parallel copies)"], 3),
    "Megatron-FSDP": ([f"in {NORM} (tensor-parallel copies)"], 3),
    "tied embeddings": (
        [f"ranks {ranks} {NO_MAJORITY} {EMBEDDINGS} (tied embeddings of the first" for ranks in ("0, 4", "1, 5")],
        4,
    ),
}
"""What the error says, and after how many steps."""


@pytest.mark.parametrize("case", marked(SAID, slow=SLOW))
def test_a_flipped_bit_is_found_by_all_ranks_and_its_place_named(
    case: str, found: Callable[[str], list[Found]]
) -> None:
    first, *others = found(case)
    assert others == [first] * len(others), "ranks tell different stories"
    texts, steps = SAID[case]
    error, exit_code, iteration = first
    assert [text for text in texts if text not in error] == [], error
    assert case != "tied embeddings" or "replicas" not in error
    assert (exit_code, iteration) == (70, steps)


def test_nothing_is_found_where_nothing_is_wrong(found: Callable[[str], list[Found]]) -> None:
    assert found("nothing wrong") == [("nothing found", 0, 6)] * 4
