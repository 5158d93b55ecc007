"""A NaN on one rank: no update anywhere, and every rank names rank, iteration and parameter."""

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.selection import chosen, marked
from tests.support.several_models import end_layout, in_turn

FLAGS = (
    "--device cpu --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--eval-iters 0 --make-vocab-size-divisible-by 16 --attention-dropout 0 --hidden-dropout 0 "
)
TP2 = "--tensor-model-parallel-size 2 --global-batch-size 2"
LATE = "read late: "
"""Begins flags whose run reads its numbers after the update, as on a GPU."""
ZERO_1 = "--use-distributed-optimizer"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --disable-bias-linear "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)
INF, NAN = float("inf"), float("nan")

LAST, FIRST = "decoder.layers.1", "decoder.layers.0"
NORM, PROJ_BIAS = f"{LAST}.input_layernorm.bias", f"{FIRST}.self_attention.linear_proj.bias"
FC1, WORDS, POSITIONS = f"{LAST}.mlp.linear_fc1.weight", "embedding.word_embeddings.weight", "embedding.position_"
FINAL_NORM = "decoder.final_layernorm.weight"


class Plant(NamedTuple):
    """One bad element."""

    rank: int
    name: str
    """The parameter's global name, or its beginning."""

    factor: float = NAN
    """What the gradient of one element is multiplied with, or replaced by if it is 0."""

    element: int = 0
    """Counted from the end if negative."""

    microbatch: int = 0
    """Of this rank; -1 is the last."""


def on_each(ranks: int, *names: str) -> list[Plant]:
    return [Plant(rank, name) for rank in range(ranks) for name in names]


LAYOUTS: dict[str, tuple[int, str, list[Plant]]] = {
    "one rank": (1, "", [Plant(0, NORM), Plant(0, WORDS, element=-1), Plant(0, FC1, INF, microbatch=-1)]),
    "data parallel": (2, "", on_each(2, NORM, FC1)),
    "distributed optimizer, overlapped": (
        2,
        f"{ZERO_1} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 700",
        on_each(2, FINAL_NORM, FC1, WORDS),
    ),
    "FSDP2": (2, "--use-torch-fsdp2", on_each(2, NORM, FC1)),
    "ZeRO-3": (2, "--use-megatron-fsdp", [*on_each(2, FC1), Plant(1, NORM, INF, microbatch=-1)]),
    "ZeRO-2": (2, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --bf16", on_each(2, NORM)),
    "tensor parallel": (
        2,
        TP2,
        [
            *on_each(2, NORM, FINAL_NORM, PROJ_BIAS, POSITIONS, FC1),
            Plant(1, NORM, INF, element=5, microbatch=-1),
            Plant(1, WORDS, element=-1),  # a row of padding
        ],
    ),
    "tensor parallel, sequence parallel": (2, f"{TP2} --sequence-parallel", on_each(2, NORM, FC1)),
    "tensor parallel, bf16": (2, f"{TP2} --bf16", on_each(2, NORM)),
    "tensor parallel, offloaded": (2, f"{TP2} --bf16 --optimizer-cpu-offload", on_each(2, NORM)),
    "tensor parallel, FSDP2": (2, f"{TP2} --use-torch-fsdp2", on_each(2, NORM)),
    "tensor parallel, FSDP2 offloaded": (2, f"{TP2} --use-torch-fsdp2 --torch-fsdp2-cpu-offload", on_each(2, NORM)),
    "tensor parallel, ZeRO-3": (2, f"{TP2} --use-megatron-fsdp", on_each(2, NORM)),
    "tensor parallel, ZeRO-1": (4, f"{TP2} {ZERO_1}", on_each(4, NORM)),
    "tensor and pipeline parallel": (
        4,
        f"{TP2} --pipeline-model-parallel-size 2",
        [Plant(3, NORM), Plant(2, FINAL_NORM), Plant(3, WORDS), Plant(1, PROJ_BIAS), Plant(1, POSITIONS)],
    ),
    "interleaved pipeline": (  # layers 0 and 2 on one rank, 1 and 3 on the other
        2,
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 2",
        [
            Plant(0, PROJ_BIAS),
            Plant(0, "decoder.layers.2.input_layernorm.bias", INF, microbatch=-1),
            Plant(1, NORM, microbatch=-1),
            Plant(1, "decoder.layers.3.mlp.linear_fc1.weight"),
            Plant(0, POSITIONS),
            Plant(1, WORDS, element=-1),
        ],
    ),
    "context parallel": (2, "--context-parallel-size 2 --global-batch-size 2", on_each(2, NORM)),
    "optimizer instances": (
        4,
        f"{ZERO_1} --num-distributed-optimizer-instances 2",
        [Plant(3, NORM), Plant(1, FC1)],
    ),
    "expert parallel": (
        2,
        EXPERTS,
        [
            Plant(0, f"{LAST}.mlp.experts.0:2.linear_fc1.weight"),
            Plant(1, f"{LAST}.mlp.experts.2:4.linear_fc2.weight", element=-1),
            Plant(1, f"{FIRST}.mlp.router.weight"),
        ],
    ),
}

LAYOUTS |= {
    f"{name}, read late": (ranks, LATE + flags, plants)
    for name, (ranks, flags, plants) in LAYOUTS.items()
    if name in ("one rank", "distributed optimizer, overlapped", "FSDP2", "ZeRO-2", "tensor parallel, bf16")
}

# Two of what others have one by one, or a precision that another has: left to --all.
REPEATED = {
    "tensor parallel, bf16",
    "tensor parallel, FSDP2 offloaded",
    "tensor parallel, ZeRO-3",
    "tensor parallel, ZeRO-1",
    "optimizer instances",
    "FSDP2, read late",
    "ZeRO-2, read late",
    "tensor parallel, bf16, read late",
}


def _build(flags: str) -> Any:
    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    here: Any = device.install("cpu")
    here.reads_wait = flags.startswith(LATE)
    return Trainer(build_run(configure((FLAGS + flags.removeprefix(LATE)).split()).config, here), [])


def _weights(run: Any) -> str:
    from megatron_ext.model.names import global_named_parameters
    from megatron_ext.parallel.rows import local_part

    with run.gathered_parameters():
        parts = [local_part(parameter) for _, parameter in global_named_parameters(run.chunks)]
        data = b"".join(part.float().numpy().tobytes() for part in parts)
    return hashlib.sha256(data).hexdigest()


class _Saboteur:
    """Spoils an element of a gradient as autograd makes it, before anything is reduced or accumulated."""

    def __init__(self, run: Any):
        from megatron_ext.model.names import global_named_parameters, unwrapped

        self.run, self.plant, self._seen = run, None, 0
        with run.gathered_parameters():
            names = {id(parameter): name for name, parameter in global_named_parameters(run.chunks)}
            for chunk in unwrapped(run.chunks):
                for module in chunk.modules():
                    for attribute, parameter in module.named_parameters(recurse=False):
                        self._follow(module, attribute, names[id(parameter)])

    def arm(self, plant: Plant) -> None:
        self.plant, self._seen = (plant if self.run.rank == plant.rank else None), 0

    def _follow(self, module: Any, attribute: str, name: str) -> None:
        """Under FSDP the gradient goes to the gathered weight, which the module has inside of its forward pass."""
        followed: list[Any] = []

        def follow(module: Any, _inputs: Any) -> None:
            weight = getattr(module, attribute)
            if not any(weight is other for other in followed):
                followed.append(weight)
                weight.register_hook(lambda gradient: self._spoil(name, gradient))

        follow(module, None)  # the last stage multiplies by a tied output layer's weight without calling the layer
        module.register_forward_pre_hook(follow)

    def _spoil(self, name: str, gradient: Any) -> Any:
        plant = self.plant
        if plant is None or not name.startswith(plant.name):
            return gradient
        self._seen += 1
        batches = self.run.config.training.global_batch_size // self.run.groups.dp.size()
        if self._seen != 1 + plant.microbatch % batches:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[plant.element] = plant.factor
        return spoilt


Found = list[tuple[str, int, bool, int]]
"""For each plant: the error, its exit code, whether weights changed, the iteration."""


def _sabotaged(flags: str, plants: Sequence[Plant]) -> Found:
    """Two good steps, a bad one for each plant, and after them a good one."""
    from megatron_ext.errors import NumericError

    trainer = _build(flags)
    trainer.step()
    saboteur = _Saboteur(trainer.run)
    trainer.step()
    found = []
    for plant in plants:
        before = _weights(trainer.run)
        saboteur.arm(plant)
        try:
            trainer.step()
            error, code = "no error", 0
        except NumericError as raised:
            error, code = str(raised), raised.exit_code
        found.append((error, code, before != _weights(trainer.run), trainer.run.state.iteration))
    saboteur.plant = None
    assert trainer.step().updated
    return found


def _sabotaged_layout(name: str) -> Found:
    _, flags, plants = LAYOUTS[name]
    return _sabotaged(flags, plants)


@pytest.fixture(scope="module")
def sabotaged(request: pytest.FixtureRequest) -> Callable[[str], list[Found]]:
    """What each rank of a layout finds; all layouts of as many ranks are trained by the same ones."""
    asked = chosen(request, "name")

    @functools.cache
    def of_ranks(size: int) -> dict[str, list[Found]]:
        names = [name for name in asked if LAYOUTS[name][0] == size]
        by_rank = run_ranks(size, in_turn, _sabotaged_layout, names, timeout=550)
        return dict(zip(names, map(list, zip(*by_rank, strict=True)), strict=True))

    return lambda name: of_ranks(LAYOUTS[name][0])[name]


@pytest.mark.first("one rank", "data parallel")
@pytest.mark.parametrize("name", marked(LAYOUTS, slow=REPEATED))
def test_a_bad_gradient_on_one_rank_is_named_and_changes_nothing(
    name: str, sabotaged: Callable[[str], list[Found]]
) -> None:
    plants, results = LAYOUTS[name][2], sabotaged(name)
    assert all(result == results[0] for result in results), "ranks tell different causes"
    for plant, (error, code, changed, iteration) in zip(plants, results[0], strict=True):
        named = re.match(r"rank (\d+): .* in the gradient of ([\w.:]+), iteration 3 ", error)
        assert named is not None, (plant, error)
        assert int(named.group(1)) == plant.rank
        assert named.group(2).startswith(plant.name)
        assert "This iteration changed no weight" in error
        assert (code, changed, iteration) == (70, False, 2), plant


def _rank_of_error(flags: str, spoil: Callable[[Any], None], bad_rank: int) -> tuple[str, bool]:
    """A good step, then one of a run that `spoil` has had on one rank."""
    from megatron_ext.errors import NumericError

    trainer = _build(flags)
    trainer.step()
    if trainer.run.rank == bad_rank:
        spoil(trainer)
    before = _weights(trainer.run)
    with pytest.raises(NumericError) as raised:
        trainer.step()
    return str(raised.value), before == _weights(trainer.run)


class Late(NamedTuple):
    """How a run ended whose third step was bad and whose numbers are read when the fourth is under way."""

    message: str
    iteration: int
    told: int
    """Iteration of which the record of the end tells."""

    begun: int
    """Steps that were begun."""

    unchanged: bool
    """Whether all is as after two steps."""


def _ended_late(flags: str) -> Late:
    from megatron_ext.errors import NumericError
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.train.callbacks.reporting import Status
    from megatron_ext.train.trainer import Callback
    from tests.support.run_state import state_hash

    two = _build(LATE + flags)
    two.step()
    two.step()
    after_two = state_hash(two.run)
    end_layout()

    trainer, begun = _build(LATE + flags), []
    saboteur = _Saboteur(trainer.run)

    class Spoils(Callback):
        def on_step_begin(self, trainer: Any) -> None:
            begun.append(trainer.position.iteration + 1)
            last = trainer.run.world_size - 1
            saboteur.arm(Plant(last, FC1 if begun[-1] == 3 else "no weight"))

    status = RunStatus(rank=trainer.run.rank)
    trainer.callbacks = [Spoils(), Status(status)]
    with pytest.raises(NumericError) as raised:
        trainer.fit()
    state = trainer.run.state
    assert status.iteration is not None
    unchanged = state_hash(trainer.run) == after_two
    return Late(str(raised.value), state.iteration, status.iteration, begun[-1], unchanged)


@pytest.mark.parametrize(("ranks", "flags"), [(2, ZERO_1), (2, "--optimizer lion --bf16"), (1, "--bf16")])
def test_a_bad_step_is_told_of_when_the_next_is_under_way_and_neither_changes_anything(ranks: int, flags: str) -> None:
    for found in run_ranks(ranks, _ended_late, flags):
        cause = f"rank {ranks - 1}: NaN or infinite values in the gradient of {FC1}, iteration 3 (samples from 8)"
        assert found.message.startswith(f"{cause}. This iteration changed no weight."), found.message
        assert found[1:] == (2, 3, 4, True)


def _spoil_loss(trainer: Any) -> None:
    trainer.run.chunks[-1].module.register_forward_hook(lambda module, inputs, output: output * NAN)


def test_a_bad_loss_on_one_rank_is_named() -> None:
    for error, unchanged in run_ranks(2, _rank_of_error, "", _spoil_loss, 1):
        assert error.startswith("rank 1: NaN or infinity in the loss, iteration 2 ")
        assert unchanged


def _spoil_what_flows_back(trainer: Any) -> None:
    from megatron_ext.model.names import unwrapped

    layer = unwrapped(trainer.run.chunks)[0].decoder.layers[-1]
    layer.mlp.linear_fc2.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * NAN, *gradients[1:]))


@pytest.mark.parametrize("layout", [TP2, "--pipeline-model-parallel-size 2"])
def test_the_cause_is_named_and_not_who_caught_it_from_there(layout: str) -> None:
    """NaN flows on to lower layers and stages, of rank 0 too."""
    for error, unchanged in run_ranks(2, _rank_of_error, layout, _spoil_what_flows_back, 1):
        assert re.match(rf"rank 1: .* in the gradient of {LAST}.mlp.linear_fc2.(weight|bias), ", error), error
        assert unchanged


def _spoil_after_the_reduction(trainer: Any) -> None:
    from megatron_ext.model.names import global_named_parameters
    from megatron_ext.train.trainer import Callback

    class Spoil(Callback):
        def before_update(self, trainer: Any) -> None:
            named: dict[str, Any] = dict(global_named_parameters(trainer.run.chunks))
            named[NORM].main_grad[0] = NAN

    trainer.callbacks = [Spoil()]


def test_a_gradient_gone_bad_after_the_reduction_is_named_and_stops_all_replicas() -> None:
    for error, unchanged in run_ranks(2, _rank_of_error, "", _spoil_after_the_reduction, 1):
        assert error.startswith(f"rank 1: 1 NaN and 0 infinite values in the reduced gradient of {NORM}, iteration 2 ")
        assert unchanged


def _spoil_a_weight(trainer: Any) -> None:
    from megatron_ext.model.names import global_named_parameters

    dict(global_named_parameters(trainer.run.chunks))[NORM].data[0] = NAN


def test_a_weight_that_was_bad_before_is_told_from_a_bad_gradient() -> None:
    for error, _ in run_ranks(2, _rank_of_error, TP2, _spoil_a_weight, 1):
        assert error.startswith(f"rank 1: 1 NaN and 0 infinite values in the weight {NORM}, at the start of iteration")
        assert "changed no weight" not in error


def _overflowing(flags: str, plants: Sequence[Plant]) -> list[tuple[bool, bool, float]]:
    trainer = _build(flags)
    saboteur = _Saboteur(trainer.run)
    read, places = trainer.run.loaders.train.global_batch, []
    trainer.run.loaders.train.global_batch = lambda first, *more: places.append(first) or read(first, *more)
    assert trainer.step().updated
    found = []
    for plant in plants:
        before = _weights(trainer.run)
        saboteur.arm(plant)
        result = trainer.step()
        found.append((result.updated, before == _weights(trainer.run), result.loss_scale))
    assert places == [0, 2, 4, 6], "the data goes on"
    assert (trainer.run.state.consumed_samples, trainer.run.state.scheduled_samples) == (8, 2)
    return found


# Without sharding it is slow: the verdict is joined in the same way.
@pytest.mark.parametrize("scheme", [pytest.param("", marks=pytest.mark.slow), ZERO_1, "--use-megatron-fsdp"])
def test_an_overflow_of_any_rank_is_skipped_by_all(scheme: str) -> None:
    flags = f"{TP2} {scheme} --fp16 --initial-loss-scale 1024 --hysteresis 1"
    plants = [Plant(0, NORM, INF), Plant(1, NORM, INF), Plant(1, PROJ_BIAS, INF, microbatch=-1)]
    for found in run_ranks(2, _overflowing, flags, plants):
        assert found == [(False, True, 512.0), (False, True, 256.0), (False, True, 128.0)]


def _train_unchecked(flags: str) -> tuple[int, float]:
    trainer = _build(flags)
    trainer.step()
    _spoil_loss(trainer)
    loss = trainer.step().loss
    return trainer.run.state.interval_nan, loss


def test_without_the_check_the_run_goes_on_and_counts() -> None:
    [(nans, loss)] = run_ranks(1, _train_unchecked, "--no-check-for-nan-in-loss-and-grad")
    assert nans == 1
    assert loss != loss
