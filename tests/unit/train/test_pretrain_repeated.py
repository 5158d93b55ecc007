"""`pretrain` in a process that goes on afterwards (a notebook): what it returns, what it leaves."""

import dataclasses
import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.derived.optimizer_traits import OptimizerTraits
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.data.corpus import Splits
from megatron_ext.errors import ConfigurationError, DataError, TrainingError
from megatron_ext.resilience.process_end import RunStatus, run_guarded
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback

# Of the second tier: tests/unit/train/test_pretrain.py runs once.
pytestmark = pytest.mark.full

MODEL = shlex.split(
    "--device cpu --mock-data --vocab-size 64 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--position-embedding-type rope --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-2 "
    "--eval-interval 2 --eval-iters 1 --exit-signal-deadline 60"
)
EXPERTS = ["--num-experts", "4", "--moe-aux-loss-coeff", "0.1", "--moe-router-topk", "2", "--disable-bias-linear"]


class OwnError(Exception):
    """What a user's own code raises."""


def fails(*_: object) -> Any:
    raise OwnError("of the user's own code")


class FailsAfter(Callback):
    """Fails at the end of a step."""

    def __init__(self, iteration: int):
        self.iteration = iteration

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.run.state.iteration == self.iteration:
            fails()


def left() -> dict[str, Any]:
    """What a run must leave as it found it."""
    gc.collect()
    gc.freeze()  # --manual-gc ends with an unfreeze: the next collection would look through torch and all tests
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)],
        "groups": torch.distributed.is_initialized(),
        "files": sorted(
            os.readlink(f"/proc/self/fd/{name}")
            for name in os.listdir("/proc/self/fd")
            if name.isdigit() and os.path.exists(f"/proc/self/fd/{name}")
        ),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "optimizers": set(OPTIMIZERS),
        "collects": gc.isenabled(),
    }


FAILURES: dict[str, tuple[str, dict[str, Any]]] = {
    "the construction": ("", {"datasets": fails}),
    "the first forward pass": ("", {"loss": fails}),
    "experts": (" ".join(EXPERTS), {"loss": fails}),
    "a callback that is made": ("", {"callbacks": [fails]}),
    "a step": ("", {"callbacks": [FailsAfter(2)], "optimizer": dataclasses.replace(OPTIMIZERS["lion"], name="own")}),
    "a save in the background": ("--save {0} --save-interval 1 --async-save", {"callbacks": [FailsAfter(2)]}),
    "everything that is open": (
        "--save {0} --tensorboard-dir {0}/tb --profile --use-pytorch-profiler --profile-step-start 1 "
        "--profile-step-end 3 --deterministic-mode --manual-gc",
        {"callbacks": [FailsAfter(2)]},
    ),
}


@pytest.fixture(scope="module")
def first_losses() -> list[float]:
    return list(pretrain(MODEL).losses)


@pytest.mark.parametrize("where", FAILURES)
def test_a_failure_leaves_nothing_and_the_next_run_trains_as_the_first_one(
    where: str, first_losses: list[float], tmp_path: Path
) -> None:
    before = left()
    flags, own = FAILURES[where]
    with pytest.raises(OwnError):
        pretrain([*MODEL, *flags.format(tmp_path).split()], **own)
    assert left() == before
    assert list(pretrain(MODEL).losses) == first_losses
    if where == "experts":  # what their routers kept had two layers
        assert len(pretrain([*MODEL, *EXPERTS, "--num-layers", "4"]).losses) == 3
        assert left() == before


def test_what_is_returned(tmp_path: Path) -> None:
    """Losses to the bit, those of this call alone after a resume; and where things are."""
    flags = [*MODEL, "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"), "--log-interval", "1"]
    stopped = pretrain([*flags, "--exit-interval", "2", "--tensorboard-dir", str(tmp_path / "tb")])
    assert (stopped.iteration, len(stopped.losses), list(stopped.validation_losses)) == (2, 2, [2])
    assert stopped.stop_reason == "--exit-interval 2"
    assert (stopped.save, stopped.tensorboard_dir) == (tmp_path / "save", tmp_path / "tb")
    ended = pretrain(flags)
    assert (ended.iteration, len(ended.losses), list(ended.validation_losses)) == (3, 1, [3])
    assert (ended.stop_reason, ended.tensorboard_dir, ended.model) == (None, None, ())
    assert ended.metrics_file == tmp_path / "save/metrics.jsonl"
    assert ended.metrics_file is not None
    rows = [json.loads(line) for line in ended.metrics_file.read_text().splitlines()]
    assert [row["lm_loss"] for row in rows if "lm_loss" in row] == [*stopped.losses, *ended.losses]
    validated = {**stopped.validation_losses, **ended.validation_losses}
    assert {row["iteration"]: row["validation_loss"] for row in rows if "validation_loss" in row} == validated
    with pytest.raises(dataclasses.FrozenInstanceError):
        ended.iteration = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_the_model_computes_once_the_run_has_ended() -> None:
    """It is that of the last step: on a batch of the training its loss is lower than at the first one."""
    seen: list[torch.Tensor] = []

    def loss(token: Any) -> torch.Tensor:
        seen.append(token.labels_BS)
        return token.cross_entropy()

    trained = pretrain([*MODEL, "--train-iters", "20", "--eval-iters", "0"], loss=loss, returns_model=True)
    [model] = trained.model
    labels = seen[0]
    tokens = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], dim=1)
    with torch.no_grad():
        found = model(tokens, torch.arange(16).expand(2, 16), labels=labels)
    assert found.shape == (2, 16)
    assert found.mean() < trained.losses[0]


def test_the_folder_is_free_for_another_process(tmp_path: Path) -> None:
    """The lock of --save belongs to the run, not to the notebook."""
    flags = [*MODEL, "--save", str(tmp_path)]
    program = f"from megatron_ext.checkpoint.native.lock import is_held; print(is_held({str(tmp_path)!r}))"
    held: list[str] = []

    class Looks(Callback):
        def on_step_end(self, trainer: Any, result: Any) -> None:
            held.append(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip())

    pretrain([*flags, "--train-iters", "1"], callbacks=[Looks])
    with pytest.raises(OwnError):
        pretrain(flags, callbacks=[FailsAfter(1)])
    after = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (held, after.stdout.strip()) == (["True"], "False")


def test_a_failure_in_the_program_leaves_the_watch_to_its_report() -> None:
    """Who gave the status ends the process: the report asks the watch how other ranks ended."""
    status = RunStatus(0)
    with pytest.raises(OwnError):
        pretrain(MODEL, status, callbacks=[FailsAfter(1)])
    assert status.watch is not None
    assert "watch" in {thread.name for thread in threading.enumerate()}
    status.watch.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Samples:
    """A dataset that gives the same for each index."""

    def __init__(self, sample: Any):
        self.sample = sample

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.sample


def datasets_of(sample: Any) -> Callable[..., Splits[Any]]:
    return lambda *_: Splits(Samples(sample), None, None)


FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
EVERY_TOKEN = "it must return the loss of every token, [batch, sequence] = [2, 16]"
WRONG: dict[str, tuple[dict[str, Any], type[TrainingError], str]] = {
    "mean": (
        {"loss": lambda token: token.cross_entropy().mean()},
        ConfigurationError,
        f"loss= returned a tensor of shape []: {EVERY_TOKEN}, and never an average",
    ),
    "turned": (
        {"loss": lambda token: token.cross_entropy().t()},
        ConfigurationError,
        f"loss= returned a tensor of shape [16, 2]: {EVERY_TOKEN}",
    ),
    "number": ({"loss": lambda token: 1.5}, ConfigurationError, f"loss= returned float and no tensor: {EVERY_TOKEN}"),
    "integers": (
        {"loss": lambda token: token.labels_BS},
        ConfigurationError,
        f"loss= returned a tensor of torch.int64: {EVERY_TOKEN}, in fp32",
    ),
    "constant": (
        {"loss": lambda token: token.cross_entropy().detach()},
        ConfigurationError,
        "loss= returned a tensor without a gradient: compute it from token.logits_SBV",
    ),
    "no function": ({"loss": 5}, ConfigurationError, "loss= is int: give a function, or leave it out"),
    "no spec": (
        {"layer_spec": lambda spec, layer: None},
        ConfigurationError,
        "layer_spec= returned NoneType for layer 0: it must return the ModuleSpec to build",
    ),
    "no parameters": (
        {"layer_spec": lambda spec, layer: spec, "layer_parameters": lambda config, layer: None},
        ConfigurationError,
        "layer_parameters= listed NoneType for layer 0: it must return a list of Parameter",
    ),
    "names of parameters": (
        {"layer_spec": lambda spec, layer: spec, "layer_parameters": lambda config, layer: ["mix"]},
        ConfigurationError,
        "layer_parameters= listed str for layer 0: it must return a list of Parameter",
    ),
    "no rate": (
        {"learning_rate": lambda samples, rate: None},
        ConfigurationError,
        "learning_rate= returned None after 0 samples: it must return a number of at least 0",
    ),
    "rate below zero": (
        {"learning_rate": lambda samples, rate: -rate},
        ConfigurationError,
        "learning_rate= returned -0.01",
    ),
    "NaN": ({"learning_rate": lambda samples, rate: float("nan")}, ConfigurationError, "learning_rate= returned nan"),
    "infinity": (
        {"learning_rate": lambda samples, rate: float("inf")},
        ConfigurationError,
        "learning_rate= returned inf",
    ),
    "no splits": (
        {"datasets": lambda *_: (Samples(None), None, None)},
        ConfigurationError,
        "datasets= returned tuple: it must return Splits(train, valid, test)",
    ),
    "no dataset": (
        {"datasets": lambda *_: Splits(Samples(None), 7, None)},
        ConfigurationError,
        "datasets= returned int as valid: a dataset has __len__ and __getitem__",
    ),
    "no sample": (
        {"datasets": datasets_of(None)},
        DataError,
        "sample 0 of the own dataset Samples is NoneType: it must be a dict of tokens, labels, loss_mask, "
        "position_ids, each of [16]",
    ),
    "no labels": (
        {"datasets": datasets_of({"tokens": [1] * 16})},
        DataError,
        "sample 0 of the own dataset Samples has no labels",
    ),
    "a token too many": (
        {"datasets": datasets_of(dict.fromkeys(FIELDS, [1] * 17))},
        DataError,
        "sample 0 of the own dataset Samples has tokens of shape [17], and --seq-length 16 reads [16]",
    ),
    "an optimizer's object": (
        {"optimizer": torch.optim.SGD([torch.zeros(1)])},
        ConfigurationError,
        "optimizer= is an object of SGD, which has weights already: give the class",
    ),
    "an optimizer that is not there": (
        {"optimizer": OptimizerTraits("own", "Own", "torch.optim:Own", {}, (), frozenset(), "adam")},
        ConfigurationError,
        "the optimizer 'own' has torch_class='torch.optim:Own', which cannot be imported",
    ),
    "no optimizer": (
        {"optimizer": OptimizerTraits("own", "Own", "torch:Tensor", {}, (), frozenset(), "adam")},
        ConfigurationError,
        "the optimizer 'own' has torch_class='torch:Tensor', which is no class derived from torch.optim.Optimizer",
    ),
    "no list": ({"callbacks": Callback()}, ConfigurationError, "callbacks= is Callback: give a list of callbacks"),
    "no callback": (
        {"callbacks": [object()]},
        ConfigurationError,
        "callbacks= has object, which is none: give what derives from Callback",
    ),
    "makes no callback": (
        {"callbacks": [dict]},
        ConfigurationError,
        "callbacks= has dict, which made dict: give what derives from Callback",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_part_that_gives_a_wrong_thing_is_named_in_a_line(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code of its kind, and no traceback; the loss and the rate are seen in the first step."""
    own, kind, said = WRONG[what]
    status = RunStatus(0)
    try:
        code = run_guarded(lambda: pretrain(MODEL, status, **own) and 0, status)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    errors = capsys.readouterr().err
    assert code == kind.exit_code, errors
    assert said in errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 2
    in_the_first_step = own.keys() <= {"loss", "learning_rate"} and what != "no function"
    assert ("found at iteration 1" in errors) == in_the_first_step
