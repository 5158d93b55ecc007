"""Two optimizers in one run, one for matrices and one for the rest: one curve in every layout, and bitwise resumed."""

import dataclasses
import functools
import shlex
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.safe_reading import SafeReader
from megatron_ext.config.derived.optimizer_traits import OptimizerTraits
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.cost.state_bytes import optimizer_bytes, state_bytes
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parts.catalogue import parameters
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.parity import compare
from megatron_ext.plugins.prove.recorded_training import RunRecord, record
from megatron_ext.train.configure import configure
from megatron_ext.train.extensions import Extensions
from tests.support.selection import marked
from tests.support.two_optimizers import EVEN_STEPS, SGD_AND_ADAM

FLAGS = shlex.split(f"{RECIPE} --seq-length 16 --mock-data --vocab-size 250 --eval-interval 100 --eval-iters 1")
ZERO_1 = "--use-distributed-optimizer"
LATE = f"{ZERO_1} --overlap-grad-reduce --overlap-param-gather"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "TP2 SP": (SGD_AND_ADAM, "tied", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (SGD_AND_ADAM, "tied", 2, PP2),
    "DP2 distributed optimizer": (SGD_AND_ADAM, "tied", 2, ZERO_1),
    "DP2 FSDP2": (SGD_AND_ADAM, "tied", 2, "--use-torch-fsdp2"),
    "DP2 ZeRO-3": (SGD_AND_ADAM, "tied", 2, "--use-megatron-fsdp"),
    "DP2 in host memory": (
        SGD_AND_ADAM,
        "tied",
        2,
        f"{ZERO_1} --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    ),
    "whole matrices, DP2": (EVEN_STEPS, "tied", 2, ""),
    "whole matrices, DP2 distributed optimizer": (EVEN_STEPS, "tied", 2, LATE),
    "whole matrices, PP2 DP2 distributed optimizer": (EVEN_STEPS, "tied", 4, f"{PP2} {ZERO_1}"),
    "whole matrices, experts, EP2 DP4": (EVEN_STEPS, "experts", 4, f"--expert-model-parallel-size 2 {ZERO_1}"),
}


@functools.cache
def one_process(optimizer: str, model: str, steps: int) -> RunRecord:
    [traits] = [each for each in (SGD_AND_ADAM, EVEN_STEPS) if each.name == optimizer]
    return record([*FLAGS, *shlex.split(MODELS[model])], 1, steps, extensions=Extensions(optimizer=traits))


# Slow: host memory updates as the device does, and the others have what each of these combines.
@pytest.mark.first("TP2 SP", "DP2 distributed optimizer")
@pytest.mark.parametrize(
    "name", marked(LAYOUTS, slow={"DP2 in host memory", "whole matrices, PP2 DP2 distributed optimizer"})
)
def test_two_optimizers_give_one_curve(name: str, steps: int) -> None:
    traits, model, ranks, flags = LAYOUTS[name]
    words = [*FLAGS, *shlex.split(MODELS[model]), *shlex.split(flags)]
    other = record(words, ranks, steps, extensions=Extensions(optimizer=traits))
    assert compare(one_process(traits.name, model, steps), other).problems() == []


def test_each_optimizer_updates_its_own(steps: int) -> None:
    """After the warmup's first step of rate 0 both have moved what is theirs: curves differ from those of one alone."""
    pair = one_process(SGD_AND_ADAM.name, "tied", steps)
    words = [*FLAGS, *shlex.split(MODELS["tied"])]
    alone = [record([*words, "--optimizer", name], 1, steps).losses for name in ("sgd", "adam")]
    assert pair.losses[0] == alone[0][0] == alone[1][0]
    assert pair.losses[-1] not in (alone[0][-1], alone[1][-1])


def _train(flags: list[str], traits: OptimizerTraits) -> list[float]:
    from megatron_ext.train.pretrain import pretrain

    return list(pretrain(flags, optimizer=traits).losses)


@pytest.mark.full
@pytest.mark.parametrize(
    ("traits", "ranks", "flags"),
    [
        (SGD_AND_ADAM, 2, LATE),
        (EVEN_STEPS, 2, f"{LATE} --bf16"),
        (SGD_AND_ADAM, 2, "--use-torch-fsdp2 --bf16"),
        (EVEN_STEPS, 1, ""),
    ],
)
def test_a_run_goes_on_bit_for_bit(traits: OptimizerTraits, ranks: int, flags: str, tmp_path: Path) -> None:
    """Saved after three steps and resumed in the same layout; the checkpoint holds each state of its own parameters."""
    words = [*FLAGS, *shlex.split(f"{MODELS['tied']} {flags} --device cpu --num-workers 0"), "--save"]
    whole = run_ranks(ranks, _train, [*words, str(tmp_path / "whole"), "--exit-interval", "6"], traits)
    begun = [*words, str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--exit-interval"]
    first = run_ranks(ranks, _train, [*begun, "3"], traits)
    then = run_ranks(ranks, _train, [*begun, "6"], traits)
    assert [one + other for one, other in zip(first, then, strict=True)] == whole
    saved = SafeReader(next((tmp_path / "run").glob("iter_*3"))).read_metadata().state_dict_metadata
    matrices = {one.name for one in parameters(configure([*words, "x", "--dry-run"]).config) if one.update == "matrix"}
    for key in (
        key for key in saved if key.startswith("optimizer.state.") and not key.startswith("optimizer.state.param.")
    ):
        state, weight = key.removeprefix("optimizer.state.").split(".", 1)
        of_matrices = state == traits.states[0].name
        assert of_matrices == any(weight.endswith(name.split(".", 3)[-1]) for name in matrices), key


@pytest.mark.full
def test_a_checkpoint_is_read_in_another_layout(tmp_path: Path) -> None:
    """Two ranks, which share flat ranges of whole matrices, save; one process goes on as they do."""
    words = [*FLAGS, *shlex.split(f"{MODELS['tied']} --device cpu --num-workers 0"), "--save"]
    begun = [*words, str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--exit-interval"]
    run_ranks(2, _train, [*begun, "3", *shlex.split(LATE)], EVEN_STEPS)
    [other] = run_ranks(1, _train, [*begun, "6"], EVEN_STEPS)
    assert other == pytest.approx(one_process(EVEN_STEPS.name, "tied", 6).losses[3:], abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2"),
        (f"{ZERO_1} --optimizer-cpu-offload", "--optimizer-cpu-offload"),
    ],
)
def test_a_layout_without_whole_matrices_is_refused(flags: str, flag: str) -> None:
    words = [*FLAGS, *shlex.split(f"{MODELS['tied']} {flags} --world-size 2 --dry-run")]
    traits = dataclasses.replace(EVEN_STEPS, schemes=OPTIMIZERS["adam"].schemes)
    own = Extensions(optimizer=traits)
    problem = f"^{flag} leaves the device without whole matrices, which steps of one size updates; leave it out "
    with own.registered(), pytest.raises(ConfigurationError, match=problem):
        own.applied(configure(words).config)


def test_the_planner_counts_the_state_of_both() -> None:
    own = Extensions(optimizer=SGD_AND_ADAM)
    with own.registered():
        config = own.applied(configure([*FLAGS, *shlex.split(MODELS["experts"]), "--dry-run"]).config)
        sizes = {expert: [0, 0] for expert in (False, True)}
        for one in parameters(config):
            sizes[one.expert is not None][one.update == "element"] += one.size
        for expert, (matrices, rest) in sizes.items():
            mean = (4 * matrices + 8 * rest) / (matrices + rest)
            assert state_bytes(config, expert=expert).optimizer == pytest.approx(mean)
        matrices, rest = (sum(each) for each in zip(*sizes.values(), strict=True))
        assert optimizer_bytes(config) == pytest.approx((4 * matrices + 8 * rest) / (matrices + rest))
