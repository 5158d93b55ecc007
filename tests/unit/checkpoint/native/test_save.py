"""Saves of a real run of one process: what they hold, when they end, and what is left where they fail."""

import errno
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import checkpoint_manifest, checkpoint_state_dict, optimizer_state, save
from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER, saved_iterations
from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import Kept, Save, save_checkpoint
from megatron_ext.errors import StorageError
from megatron_ext.parts.layer import ResidualLayer
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors
from tests.support.checkpoints import FLAGS, train, trained_alone
from tests.support.operator_calls import Calls, aten
from tests.support.run_state import state_hash

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --disable-bias-linear --swiglu"
RUNS = [
    "--hidden-dropout 0.1 --attention-dropout 0.1",
    "--bf16 --use-distributed-optimizer",
    "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1",
    "--optimizer sgd",
    "--optimizer lion --bf16",
    f"--bf16 {EXPERTS}",
    f"{EXPERTS} --moe-grouped-gemm",
    "--use-distributed-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
]


def state_of(run: Any) -> tuple[Any, ...]:
    """Return all that the next step of a run follows from."""
    generators = {
        name: bytes(state.numpy()) for name, state in checkpoint_state_dict.random_tracker().get_states().items()
    }
    # Masters that lie in host memory have none between steps; the losses that follow are theirs.
    digest = "" if run.config.optimizer.optimizer_cpu_offload else state_hash(run)
    return (
        digest,
        run.state,
        generators,
        bytes(torch.get_rng_state().numpy()),
        checkpoint_state_dict.grad_scaler_state(run),
    )


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("words", RUNS)
def test_a_loaded_run_goes_on_as_the_saved_one_did(words: str, background: bool, tmp_path: Path) -> None:
    """From the second save of a run, which is begun at step 3 and may be written while the training goes on."""
    flags = [*FLAGS, *words.split()]
    run, kept = trained_alone(flags, 1), Kept()
    Save(run, tmp_path, background=background, kept=kept).finish()
    train(run, 2)
    begun = Save(run, tmp_path, background=background, kept=kept)
    begun.hold_update()
    then = state_of(run)
    then = (*then[:1], type(run.state)(**vars(run.state)), *then[2:])
    losses = train(run, 3)
    path = begun.finish()
    assert begun.written()
    again = trained_alone(flags, 1)
    assert load_checkpoint(again, tmp_path) == 3
    assert state_of(again) == then
    assert train(again, 3) == losses
    files = checkpoint_manifest.read(path)
    assert files is not None
    assert sorted([*files, checkpoint_manifest.MANIFEST]) == sorted(
        str(file.relative_to(path)) for file in path.iterdir()
    )
    assert checkpoint_manifest.problems(path, files) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iter_0000001", "iter_0000003", TRACKER]


class Counting(ResidualLayer):
    """Counts its passes in a buffer that is another tensor after each."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self.passes = self.passes + 1
        return super().forward(*arguments, **named)


def test_a_buffer_that_a_layer_replaces_is_saved_as_it_is_then(tmp_path: Path) -> None:
    run, kept = trained_alone(FLAGS, layer_spec=lambda spec, _: replace(spec, module=Counting)), Kept()
    for steps in (1, 2):
        train(run, steps)
        path = Save(run, tmp_path, background=True, kept=kept).finish()
        passes = run.state.iteration * 2  # microbatches of a step
        assert Tensors(path).read("decoder.layers.passes").unique().tolist() == [passes]


def test_what_does_not_fit_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save of a run knows it when it is planned, the next one before anything is copied."""
    run, kept = trained_alone(FLAGS, 1), Kept()
    path = Save(run, tmp_path, background=False, kept=kept).finish()
    tensors = Tensors(path)
    held = [(tensors.shape(name), tensors.dtype(name)) for name in tensors.names()]
    needed = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in held)
    assert kept.size == needed
    for (background, known), lacks in itertools.product(((False, False), (False, True), (True, True)), (1, 0)):
        train(run, 1)
        monkeypatch.setattr(save.shutil, "disk_usage", lambda path, lacks=lacks: SimpleNamespace(free=needed - lacks))
        if not lacks:
            Save(run, tmp_path, background=background, kept=kept if known else None).finish()
            continue
        saved = saved_iterations(tmp_path)
        with pytest.raises(StorageError, match=rf"{needed:,} bytes are needed, {needed - 1:,} are free"):
            Save(run, tmp_path, background=background, kept=kept if known else None)
        assert saved_iterations(tmp_path) == saved
        assert not list(tmp_path.glob(".iter*"))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("fails", "error", "told"),
    [
        ("write_shards", OSError(errno.EIO, "Input/output error"), "Input/output error"),
        ("publish", OSError(errno.EIO, "Input/output error"), "Input/output error"),
        ("publish", OSError(errno.ENOSPC, "No space left on device", "/a"), "No space left on device: /a"),
        ("write_shards", OSError("unknown"), "unknown"),
        ("write_shards", ValueError("no such tensor"), "ValueError: no such tensor"),
    ],
)
def test_a_save_that_fails_says_why_and_leaves_nothing(
    fails: str, error: Exception, told: str, background: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What fails in the thread is told by the end of the save."""

    def fail(*_: Any) -> None:
        raise error

    run = trained_alone([*FLAGS, "--num-layers", "1"], 1)
    save_checkpoint(run, tmp_path)
    train(run, 1)
    monkeypatch.setattr(save, fails, fail)
    begun = Save(run, tmp_path, background=background)
    begun.join()
    with pytest.raises(StorageError) as caught:
        begun.finish()
    assert str(caught.value).startswith(f"cannot save a checkpoint to {tmp_path}: {told}. Earlier checkpoints there")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iter_0000001", TRACKER]


def test_flags_leave_out_the_optimizer_and_the_generators(tmp_path: Path) -> None:
    run = trained_alone([*FLAGS, "--no-save-optim", "--no-save-rng"], 1)
    tensors = Tensors(save_checkpoint(run, tmp_path))
    assert not [name for name in tensors.names() if name.startswith("optimizer.")]
    assert {"optimizer_step", "grad_scaler", "rng_grid"} & set(tensors.common()) == set()


class Device:
    """Reads numbers when it is told to, and remembers which."""

    torch_device = torch.device("cpu")

    def __init__(self, *, reads_wait: bool) -> None:
        self.reads_wait = reads_wait
        self.given: list[float] = []
        self.read: list[int] = []

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        number = len(self.given)
        self.given.append(float(numbers))

        def read() -> list[float]:
            self.read.append(number)
            return [self.given[number]]

        return read


def asked(device: Device, *others: bool) -> list[bool]:
    """What a save of a rank that has written says step after step, while another rank writes or does not."""
    save: Any = object.__new__(Save)
    save.run, save._thread = SimpleNamespace(device=device), None
    found = []
    for other in others:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", lambda sent, op, other=other: sent.clamp_(min=float(other)))
            found.append(save.written())
    return found


def test_who_waits_for_other_ranks_reads_the_answer_of_the_step_before() -> None:
    gpu = Device(reads_wait=True)
    assert asked(gpu, True, True, False, False) == [False, False, False, True]
    assert gpu.given == [1.0, 1.0, 0.0, 0.0]
    assert gpu.read == [0, 1, 2], "never the last, behind which the next step waits"
    cpu = Device(reads_wait=False)
    assert asked(cpu, True, False) == [False, True]
    assert cpu.read == [0, 1]


def part_of(*optimizers: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(updater=SimpleNamespace(torch_optimizers=list(optimizers)))


def test_the_count_of_updates_is_read_once_for_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(8)]
    adam, momentum = torch.optim.AdamW(weights[:7]), torch.optim.SGD(weights[7:], momentum=0.9)
    parts = [part_of(adam), part_of(momentum)]
    assert optimizer_state.step_count(parts) == 0
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.ones(2)
        adam.step()
        momentum.step()
    lists: list[int] = []
    genuine = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor.numel()) or genuine(tensor))
    with Calls() as calls:
        assert optimizer_state.step_count(parts) == 3
    assert lists == [7]
    assert aten._local_scalar_dense.default not in {operator for operator, _, _ in calls.calls}
    adam.state[weights[0]]["step"] += 1.0
    with pytest.raises(AssertionError, match="differ in their number of updates"):
        optimizer_state.step_count(parts)
    monkeypatch.setitem(momentum.param_groups[0], "step", 3)  # as apex counts
    adam.state[weights[0]]["step"] -= 1.0
    assert optimizer_state.step_count(parts) == 3
