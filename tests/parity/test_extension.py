"""The example of docs/extending.md, a user's own parts of everything, in TP, PP, CP and DP against one process."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.extension.extension import EXTENSIONS, Progressions
from megatron_ext.config.optimizers import OPTIMIZERS
from megatron_ext.errors import ConfigurationError
from megatron_ext.train.configure import configure
from megatron_ext.train.extensions import NONE, Extensions
from megatron_ext.verify.cases import MODELS, RECIPE
from megatron_ext.verify.parity import STEPS, compare
from megatron_ext.verify.ranks import run_ranks
from megatron_ext.verify.record import RunRecord, record
from tests.support.launched import finish, start_python
from tests.support.selection import marked

ROOT = Path(__file__).resolve().parents[2]
DATA = "--seq-length 16 --mock-data --vocab-size 250 --eval-interval 100 --eval-iters 1"
FLAGS = [*RECIPE.replace("--lr 1e-3", "--lr 1e-2").split(), *MODELS["tied"].split(), *DATA.split()]
LAYOUTS = {
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 VPP2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "CP2": (2, "--context-parallel-size 2"),
    "DP2 distributed optimizer": (2, "--use-distributed-optimizer"),
    "DP2 FSDP2": (2, "--use-torch-fsdp2"),
    "TP2 PP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


@functools.cache
def one_process(*left_out: str, steps: int = STEPS) -> RunRecord:
    kept = dataclasses.replace(EXTENSIONS, **dict.fromkeys(left_out))
    return record(FLAGS, 1, steps, extensions=kept)


@pytest.mark.parametrize("name", marked(LAYOUTS, slow={"TP2 PP2"}))
def test_the_example_has_one_loss_curve(name: str, steps: int) -> None:
    world_size, flags = LAYOUTS[name]
    other = record([*FLAGS, *flags.split()], world_size, steps, extensions=EXTENSIONS)
    assert compare(one_process(steps=steps), other).problems() == []


def test_the_example_learns() -> None:
    losses = one_process().losses
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("part", ["datasets", "loss", "layer_spec"])
def test_every_part_of_the_model_and_its_data_is_the_users(part: str) -> None:
    assert one_process(part, steps=1).losses[0] != one_process().losses[0]


@pytest.mark.parametrize("part", ["optimizer", "learning_rate"])
def test_every_part_of_the_update_is_the_users(part: str) -> None:
    found = one_process(part, steps=10).losses  # the rate is halved after 64 samples, eight steps
    assert found[0] == one_process().losses[0]
    assert found[-1] != one_process().losses[len(found) - 1]


def _own_cross_entropy() -> tuple[list[float], list[float]]:
    """The rank's logits are a quarter of the vocabulary; what their loss and its gradient are."""
    from megatron.core import parallel_state

    from megatron_ext.model.loss import TokenLogits

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = torch.distributed.get_rank()
    random = torch.Generator().manual_seed(7)
    whole = torch.randn(3, 2, 8, generator=random) * 20
    labels = torch.randint(8, (2, 3), generator=random)
    expected = whole.clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.t().flatten(), reduction="none")
    losses.square().sum().backward()
    own = whole[..., 4 * rank : 4 * rank + 4].clone().requires_grad_()
    group = parallel_state.get_tensor_model_parallel_group()
    assert isinstance(group, torch.distributed.ProcessGroup)
    result = TokenLogits(own, labels, group).cross_entropy()
    result.square().sum().backward()
    assert own.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(result, losses.view(3, 2).t(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own.grad, expected.grad[..., 4 * rank : 4 * rank + 4], rtol=1e-5, atol=1e-6)
    parallel_state.destroy_model_parallel()
    return result.flatten().tolist(), own.grad.flatten().tolist()


def test_the_cross_entropy_over_shards_is_torchs() -> None:
    (first, _), (second, _) = run_ranks(2, _own_cross_entropy)
    assert first == second


def test_the_example_runs_as_a_program(tmp_path: Path) -> None:
    """It resumes as any run does: the own optimizer's state is saved by its name."""
    program = [str(ROOT / "examples" / "extension" / "extension.py"), *FLAGS, "--device", "cpu"]
    program += ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--log-interval", "1"]
    program += ["--num-workers", "0", "--exit-interval"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program, "2"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "lowest loss: " in ended.stdout
    finish(start_python([*program, "4"], tmp_path / "log"), tmp_path / "log")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["lm_loss"] for row in rows if "lm_loss" in row]
    np.testing.assert_array_equal(losses, one_process().losses[:4])


def test_too_short_a_dataset_is_named() -> None:
    config = configure([*FLAGS, "--dry-run"]).config
    from megatron_ext.data.corpus import Splits

    short = Extensions(datasets=lambda *_: Splits(Progressions(3, 16, 250, 0), None, None))
    with pytest.raises(ConfigurationError, match="has 3 samples, and the run reads 160"):
        short.own_datasets(config, None, Splits(160, 0, 0))  # pyright: ignore[reportArgumentType]


def test_an_optimizer_that_a_scheme_cannot_run_is_refused() -> None:
    config = configure([*FLAGS, "--use-distributed-optimizer", "--dry-run"]).config
    assert EXTENSIONS.optimizer is not None
    traits = dataclasses.replace(EXTENSIONS.optimizer, name="not-everywhere", schemes=frozenset())
    with pytest.raises(ConfigurationError, match="--use-distributed-optimizer cannot run heavy ball"):
        Extensions(optimizer=traits).applied(config)
    assert "not-everywhere" not in OPTIMIZERS
    with pytest.raises(ConfigurationError, match="there is an optimizer 'adam' already"):
        Extensions(optimizer=dataclasses.replace(traits, name="adam")).applied(config)
    assert NONE.applied(config) is config
