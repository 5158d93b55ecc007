"""The tiny copy of a recipe of each family trains its 5 steps on CPU ranks, and the loss goes down."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_ext.verify.ranks import run_ranks
from tests.support.in_turn import in_turn
from tools.recipes import find, recipes, reduce

FAMILIES = ("gpt2-124m", "llama3.1-8b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "olmo2-7b")


def train(flags: Sequence[str]) -> list[float]:
    """On a rank of `run_ranks`: the losses of 5 steps."""
    from megatron_ext import device
    from megatron_ext.train.configure import configure

    configured = configure(flags)
    installed = device.install("cpu")
    from megatron_ext.train.build import build_run
    from megatron_ext.train.trainer import Trainer

    trainer = Trainer(build_run(configured.config, installed, None), [])
    return [trainer.step().loss for _ in range(configured.config.training.train_iters or 0)]


def trained(names: Sequence[str], most_ranks: int, folder: Path) -> Mapping[str, list[float]]:
    """The losses of each tiny copy; those with as many ranks share them."""
    by_ranks: dict[int, dict[str, list[str]]] = {}
    for name in names:
        values, ranks = reduce(find(name).values, most_ranks)
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(values))
        by_ranks.setdefault(ranks, {})[name] = ["--config", str(file)]
    losses: dict[str, list[float]] = {}
    for ranks, flags in by_ranks.items():
        last_rank = run_ranks(ranks, in_turn, train, list(flags.values()))[-1]
        losses |= dict(zip(flags, last_rank, strict=True))
    return losses


def check(losses: Mapping[str, list[float]]) -> None:
    for name, steps in losses.items():
        assert len(steps) == 5, name
        assert steps[0] == pytest.approx(5.5, abs=0.2), f"{name}: ln(250) at first"
        assert steps[-1] < steps[0] - 0.02, f"{name}: {steps}"


def test_a_tiny_copy_of_every_family_trains(tmp_path: Path) -> None:
    check(trained(FAMILIES, 2, tmp_path))


@pytest.mark.slow
def test_a_tiny_copy_of_every_recipe_trains_in_its_own_layout(tmp_path: Path) -> None:
    check(trained([recipe.name for recipe in recipes() if recipe.devices], 8, tmp_path))
