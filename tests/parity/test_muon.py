"""Muon in the program: the curve of Megatron's package, bitwise resumed, and resumed in other layouts.

Its rows of the parity matrix are in `plugins/prove/compared_layouts.py`, its planted faults in
test_planted_faults.py."""

import shlex
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.safe_reading import SafeReader
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parts.catalogue import parameters
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.parity import CURVE_TOLERANCE
from megatron_ext.plugins.prove.recorded_training import record
from megatron_ext.train.configure import configure
from megatron_ext.train.extensions import Extensions

FLAGS = shlex.split(f"{RECIPE} --seq-length 16 --mock-data --vocab-size 250 --eval-interval 100 --eval-iters 1")
ZERO_1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"


def test_twenty_steps_of_a_model_are_those_of_megatrons_package() -> None:
    pytest.importorskip("emerging_optimizers.orthogonalized_optimizers")
    from tests.support.megatrons_muon import REFERENCE

    words = [*FLAGS, *shlex.split(MODELS["untied"]), "--micro-batch-size", "8"]
    reference = record(words, 1, 20, extensions=Extensions(optimizer=REFERENCE))
    muon = shlex.split("--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2 --muon-no-split-qkv")
    ours = record([*words, *muon], 1, 20)
    assert ours.losses == pytest.approx(reference.losses, abs=1e-6)
    assert ours.losses[-1] < ours.losses[0] - 0.2


def _train(flags: list[str]) -> list[float]:
    from megatron_ext.train.pretrain import pretrain

    return list(pretrain(flags).losses)


def _words(model: str, flags: str, folder: Path, last: int, load: Path | None = None) -> list[str]:
    run = f"{MODELS[f'{model}, Muon']} {flags} --device cpu --num-workers 0 --exit-interval {last}"
    return [*FLAGS, *shlex.split(run), "--save", str(folder), "--load", str(load or folder)]


# Slow: other ways to divide the same state.
@pytest.mark.parametrize(
    ("model", "ranks", "flags"),
    [
        ("untied", 2, f"{ZERO_1} --bf16"),
        pytest.param("untied", 2, f"{TP2} --bf16", marks=pytest.mark.slow),
        pytest.param("untied", 2, "--use-torch-fsdp2 --bf16", marks=pytest.mark.slow),
        pytest.param("experts", 2, f"{FSDP} optim_grads_params", marks=pytest.mark.slow),
        pytest.param("latents", 1, "", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_bit_for_bit(model: str, ranks: int, flags: str, tmp_path: Path) -> None:
    """Resumed from its save after two steps; of matrices the checkpoint has the momentum, of others Adam's two."""
    folder = tmp_path / "whole"
    [whole, *_] = run_ranks(ranks, _train, _words(model, f"{flags} --save-interval 2", folder, 4))
    [then, *_] = run_ranks(ranks, _train, _words(model, f"{flags} --ckpt-step 2", tmp_path / "run", 4, folder))
    assert then == whole[2:]
    words = [*_words(model, flags, tmp_path, 4), "--dry-run", "--world-size", str(ranks)]
    matrices = {one.name.split(".", 3)[-1] for one in parameters(configure(words).config) if one.update == "matrix"}
    saved = SafeReader(next(folder.glob("iter_*2"))).read_metadata().state_dict_metadata
    kept = [key.removeprefix("optimizer.state.").split(".", 1) for key in saved if key.startswith("optimizer.state.")]
    found = {(state, any(weight.endswith(_unnumbered(name)) for name in matrices)) for state, weight in kept}
    expected = {("momentum_buffer", True), ("exp_avg", False), ("exp_avg_sq", False)}
    assert found - {("param", True), ("param", False)} == expected


def _unnumbered(name: str) -> str:
    """Return the end of a name that checkpoints stack over experts."""
    return name.rsplit(".experts.", 1)[-1].split(".", 1)[-1] if ".experts." in name else name


# Slow: the others read what these write.
@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("untied", (4, f"{TP2} {ZERO_1}"), (2, "--use-torch-fsdp2")),
        pytest.param("untied", (2, f"{FSDP} optim_grads"), (4, f"{TP2} {ZERO_1}"), marks=pytest.mark.slow),
        pytest.param(
            "experts",
            (2, "--expert-model-parallel-size 2"),
            (4, f"{TP2} --expert-model-parallel-size 2 {ZERO_1}"),
            marks=pytest.mark.slow,
        ),
        pytest.param("latents", (2, "--pipeline-model-parallel-size 2"), (2, TP2), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_another_layout(
    model: str, before: tuple[int, str], after: tuple[int, str], tmp_path: Path
) -> None:
    [whole] = run_ranks(1, _train, _words(model, "", tmp_path / "whole", 6))
    [first, *_] = run_ranks(before[0], _train, _words(model, before[1], tmp_path / "run", 3))
    [then, *_] = run_ranks(after[0], _train, _words(model, after[1], tmp_path / "run", 6))
    assert first + then == pytest.approx(whole, abs=CURVE_TOLERANCE)


@pytest.mark.full
def test_parts_as_matrices_are_asked_for_and_warned_of() -> None:
    """Blocks make another curve, as the warning says; the two other ways of tensor parallelism do not."""
    words = [*FLAGS, *shlex.split(f"{MODELS['untied, Muon']} --muon-tp-mode blockwise")]
    said = configure([*words, *shlex.split(f"{TP2} --world-size 2 --dry-run")]).typed.warnings
    assert any("--muon-tp-mode blockwise updates the part of a matrix" in one for one in said)
    assert configure([*words, "--dry-run"]).typed.warnings == ()
    whole, blocks = (record([*words, *shlex.split(flags)], ranks, 4).losses for flags, ranks in (("", 1), (TP2, 2)))
    assert blocks[0] == pytest.approx(whole[0], abs=1e-6)
    assert abs(blocks[-1] - whole[-1]) > CURVE_TOLERANCE
