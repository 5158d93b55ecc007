"""What of a checkpoint is put back into a run, by the flags, in one process. tests/distributed/test_loading.py
has more of them, and bf16."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import checkpoint_state_dict
from megatron_ext.checkpoint.native import load_checkpoint as reading
from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.errors import DataError
from tests.support.checkpoints import FLAGS, trained_alone
from tests.support.small_runs import built

FLAGS_OF_A_LOAD = ("--finetune", "--no-load-optim", "--no-load-rng")
DROPOUT = [*FLAGS, "--hidden-dropout", "0.1"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 1 and 2, the second without the state of the generators, the third without that of the optimizer."""
    from megatron_ext.parallel import groups

    folder = tmp_path_factory.mktemp("saved")
    for step, left_out in ((1, ()), (2, ("--no-save-rng",)), (3, ("--no-save-optim",))):
        save_checkpoint(trained_alone([*DROPOUT, *left_out], step), folder)
    groups.destroy()
    return folder


def parts_of(run: Any) -> tuple[float, int, bytes, int, int]:
    """Return numbers of the weights, the optimizer, the generators and the progress."""
    states = [state for part in run.optimizer.chained_optimizers for state in part.optimizer.state.values()]
    return (
        sum(float(weight.double().abs().sum().item()) for weight in run.chunks[0].parameters()),
        sum(float(state["exp_avg_sq"].double().sum()) > 0 for state in states),
        b"".join(bytes(state.numpy()) for state in checkpoint_state_dict.random_tracker().get_states().values())
        + bytes(torch.get_rng_state().numpy()),
        run.state.iteration,
        run.state.scheduled_samples,
    )


@pytest.mark.parametrize(
    "words", [list(words) for size in range(4) for words in itertools.combinations(FLAGS_OF_A_LOAD, size)]
)
def test_every_flag_leaves_out_its_own_part(words: list[str], saved: Path) -> None:
    whole = parts_of(trained_alone(DROPOUT, 1))
    fresh = parts_of(trained_alone(DROPOUT))
    run = trained_alone([*DROPOUT, *words])
    assert load_checkpoint(run, saved / "iter_0000001") == 1
    weights, optimizer, generators, iteration, scheduled = parts_of(run)
    finetune, no_optimizer, no_generators = (
        f"--{name}" in words for name in ("finetune", "no-load-optim", "no-load-rng")
    )
    assert weights == whole[0]
    assert optimizer == (0 if finetune or no_optimizer else whole[1])
    assert (generators == whole[2]) == (not (finetune or no_generators))
    assert (generators == fresh[2]) == (finetune or no_generators)
    assert iteration == (0 if finetune else 1)
    assert scheduled == (0 if finetune or no_optimizer else whole[4])


@pytest.mark.parametrize(("dropout", "told"), [("--hidden-dropout", True), ("--attention-dropout", True), ("", False)])
def test_new_random_numbers_are_told_of_where_there_is_dropout(
    dropout: str, told: bool, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = ["--hidden-dropout", "0", "--attention-dropout", "0"]
    run = trained_alone([*FLAGS, *none, *([dropout, "0.1"] if dropout else [])])
    capsys.readouterr()
    assert load_checkpoint(run, saved / "iter_0000002") == 2
    said = "iter_0000002 holds no random state that can be used here: dropout goes on from new random numbers"
    assert (said in capsys.readouterr().err) == told


def test_an_optimizer_that_is_not_there_is_missed_where_it_is_wanted(saved: Path) -> None:
    with pytest.raises(DataError, match="was saved without optimizer state; add --no-load-optim"):
        load_checkpoint(trained_alone(DROPOUT), saved)
    for words in (["--no-load-optim"], ["--finetune"]):
        assert load_checkpoint(trained_alone([*DROPOUT, *words]), saved) == 3


def test_a_release_is_weights_alone(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "release").symlink_to(saved / "iter_0000001")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    run = trained_alone(DROPOUT)
    load_checkpoint(run, tmp_path)
    weights, optimizer, _, iteration, _ = parts_of(run)
    assert weights == parts_of(trained_alone(DROPOUT, 1))[0]
    assert (optimizer, iteration) == (0, 0)


def test_a_folder_without_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    run = trained_alone(DROPOUT)
    assert load_checkpoint(run, tmp_path) is None
    assert run.state.iteration == 0


class Gpu:
    """In the place of a GPU."""

    kind = "cuda"


@pytest.mark.parametrize(("on_gpu", "exchange"), [(True, "broadcast"), (False, "gather_object")])
def test_who_reads_a_checkpoint_together(on_gpu: bool, exchange: str) -> None:
    """All that hold the same weights, context-parallel ranks too; the engine's broadcast needs a GPU."""
    gpu: Any = Gpu()
    with built("--ckpt-fully-parallel-load") as run:
        found: Any = reading._reading(dataclasses.replace(run, device=gpu) if on_gpu else run)
        assert found.parallelization_group is run.groups.dp_cp
        assert found.exchange_algo == exchange
    with built() as run:
        assert isinstance(reading._reading(run), reading.TorchDistLoadShardedStrategy)


class _Group:
    def __init__(self, ranks: int):
        self.size = lambda: ranks


def test_weights_are_written_in_turn_by_those_that_hold_them() -> None:
    """The largest first, each by whoever has the least to write; experts by their own copies. The engine takes the
    replica with the number 0 for the one that writes."""
    groups: Any = SimpleNamespace(dp_cp=_Group(3), expt_dp=_Group(2))

    def weight(elements: int, *, expert: bool = False) -> Any:
        data: Any = torch.zeros(elements)
        data.allreduce = not expert
        return SimpleNamespace(data=data, replica_id=(0, 0, 1))

    weights: Any = {"a": weight(5), "b": weight(9), "c": weight(4), "d": weight(4), "e": weight(7, expert=True)}
    weights["f"] = weight(6, expert=True)
    models = checkpoint_state_dict.Contents({}, weights, {}, {})
    checkpoint_state_dict._spread(models, SimpleNamespace(groups=groups))  # pyright: ignore[reportArgumentType]
    assert models.replicas == dict.fromkeys(weights, 1), "where they were"
    writers = {name: (1 - one.replica_id[-1]) % (2 if name in "ef" else 3) for name, one in weights.items()}
    assert writers == {"b": 0, "a": 1, "c": 2, "d": 2, "e": 0, "f": 1}
    assert all(one.replica_id[:-1] == (0, 0) and one.replica_id[-1] in range(3) for one in weights.values())
