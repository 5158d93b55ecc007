"""--finetune, --no-load-optim, --no-load-rng, --ckpt-step, --no-save-optim and --no-save-rng, by what they leave."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.optimizer_state import step_count
from megatron_ext.verify.ranks import RankError, run_ranks
from tests.support import checkpoints
from tests.support.checkpoints import build, save_at

BF16 = [*checkpoints.FLAGS, "--num-layers", "1", "--bf16"]


@dataclass(frozen=True)
class Loaded:
    iteration: int
    samples: int
    scheduled: int
    weights: float
    """Sum of the absolute values."""
    masters: float
    """The same of the fp32 copies, rounded as the weights are."""
    moments: float
    updates: int
    rng: bytes


def _look(folder: str | None, flags: list[str]) -> Loaded:
    run = build(flags)
    if folder is not None:
        load_checkpoint(run, folder)
    parts = run.sharding.parts(run.optimizer)
    states: list[Any] = [state for part in parts for state in part.core.optimizer.state.values()]
    groups = [group for part in parts for group in part.core.optimizer.param_groups]
    return Loaded(
        iteration=run.state.iteration,
        samples=run.state.consumed_samples,
        scheduled=run.state.scheduled_samples,
        weights=sum(float(weight.double().abs().sum()) for chunk in run.chunks for weight in chunk.parameters()),
        masters=sum(float(main.bfloat16().double().abs().sum()) for group in groups for main in group["params"]),
        moments=sum(float(state["exp_avg"].abs().sum()) for state in states if "exp_avg" in state),
        updates=step_count(parts),
        rng=bytes(torch.get_rng_state().numpy()),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Iterations 1 and 3, of 2 samples each."""
    folder = str(tmp_path_factory.mktemp("saved"))
    run_ranks(1, save_at, folder, [1, 3], BF16)
    return folder


@pytest.fixture(scope="module")
def fresh() -> Loaded:
    [loaded] = run_ranks(1, _look, None, BF16)
    return loaded


def _load(folder: str, *flags: str) -> Loaded:
    [loaded] = run_ranks(1, _look, folder, [*BF16, *flags])
    assert loaded.masters == pytest.approx(loaded.weights, rel=1e-12), "the fp32 copies are those of other weights"
    return loaded


def test_everything(saved: str, fresh: Loaded) -> None:
    loaded = _load(saved)
    assert (loaded.iteration, loaded.samples, loaded.scheduled, loaded.updates) == (3, 6, 6, 3)
    assert loaded.weights != fresh.weights
    assert loaded.rng != fresh.rng
    assert loaded.moments > 0


def test_finetune(saved: str, fresh: Loaded) -> None:
    loaded = _load(saved, "--finetune")
    assert (loaded.iteration, loaded.samples, loaded.scheduled, loaded.updates, loaded.moments) == (0, 0, 0, 0, 0)
    assert loaded.weights == _load(saved).weights
    assert loaded.rng == fresh.rng


def test_no_load_optim(saved: str) -> None:
    loaded, whole = _load(saved, "--no-load-optim"), _load(saved)
    assert (loaded.iteration, loaded.samples, loaded.scheduled, loaded.updates, loaded.moments) == (3, 6, 0, 0, 0)
    assert (loaded.weights, loaded.rng) == (whole.weights, whole.rng)


def test_no_load_rng(saved: str, fresh: Loaded) -> None:
    loaded, whole = _load(saved, "--no-load-rng"), _load(saved)
    assert loaded.rng == fresh.rng
    assert (loaded.weights, loaded.moments, loaded.updates) == (whole.weights, whole.moments, whole.updates)


def test_an_earlier_step(saved: str) -> None:
    assert _load(saved, "--load", saved, "--ckpt-step", "1").iteration == 1
    with pytest.raises(RankError, match=r"iter_0000002 is missing or not whole; .* are those of: 1, 3"):
        _load(saved, "--load", saved, "--ckpt-step", "2")


def test_saved_without_optimizer_or_generators(saved: str, fresh: Loaded, tmp_path: Path) -> None:
    run_ranks(1, save_at, str(tmp_path), [3], [*BF16, "--no-save-optim", "--no-save-rng"])
    shard = "iter_0000003/__0_0.distcp"
    assert (tmp_path / shard).stat().st_size < (Path(saved) / shard).stat().st_size / 2
    with pytest.raises(RankError, match="without optimizer state; add --no-load-optim"):
        _load(str(tmp_path))
    loaded = _load(str(tmp_path), "--no-load-optim")
    assert (loaded.iteration, loaded.updates, loaded.weights) == (3, 0, _load(saved).weights)
    assert loaded.rng == fresh.rng


def test_the_state_of_another_optimizer(saved: str) -> None:
    """It lacks the tensors of SGD, and Lion's is called as one of Adam's: either way it is another state."""
    with pytest.raises(RankError, match=r"has the state of --optimizer adam, .* --optimizer lion cannot go on; use"):
        _load(saved, "--optimizer", "lion")
    with pytest.raises(RankError, match=r"has the state of --optimizer adam, .* --optimizer sgd cannot go on; use"):
        _load(saved, "--optimizer", "sgd")
    loaded, whole = _load(saved, "--optimizer", "sgd", "--no-load-optim"), _load(saved)
    assert (loaded.iteration, loaded.weights, loaded.moments) == (3, whole.weights, 0)
