"""A run from its construction to its end, with stand-ins for model and loop: what is loaded, watched and remembered."""

import dataclasses
import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint.native import load
from megatron_ext.config.schema import CheckpointConfig
from megatron_ext.errors import ConfigurationError, DataError, StoppedBySignal
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.telemetry.banner import Begun
from megatron_ext.train import build, datasets, pretrain, trainer
from megatron_ext.train.callbacks import standard
from megatron_ext.train.extensions import NONE, Extensions
from megatron_ext.train.state import TrainState
from tests.support.small_models import small_config

NOTHING: Any = None


def ends_with(heard: list[Any], word: str) -> ExitStack:
    """Return what a run is to close at its end, which then says a word."""
    ends = ExitStack()
    ends.callback(heard.append, word)
    return ends


@pytest.mark.parametrize(("finetune", "done"), [(False, ["load", "compare"]), (True, ["load"])])
def test_finetuning_may_have_other_data(finetune: bool, done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(load, "load_found", lambda run, resume: heard.append("load"))
    monkeypatch.setattr(datasets, "check_data_is_that_of_the_checkpoint", lambda run, resume: heard.append("compare"))
    resume: Any = SimpleNamespace(is_snapshot=False, iteration=3, path=NOTHING)
    flags = CheckpointConfig(load="ckpt", finetune=finetune)
    pretrain._load(SimpleNamespace(rank=1), flags, resume)  # pyright: ignore[reportArgumentType]
    assert heard == done


@pytest.mark.parametrize("accepts", [False, True])
def test_data_that_differs_on_another_node_is_told_on_all(accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This node's ranks found nothing; of a node one rank looks, and the others have no record."""

    def gather(nodes: list[list[str]], own: list[str]) -> None:
        nodes[:] = [own, [], ["a.bin has other content"], []]

    monkeypatch.setattr(datasets.torch.distributed, "all_gather_object", gather)
    config = dataclasses.replace(small_config(), checkpoint=CheckpointConfig(accept_changed_data=accepts))
    run: Any = SimpleNamespace(world_size=4, rank=1, data_record=None, config=config)
    resume: Any = SimpleNamespace(data_record={}, path="ckpt/iter_0000003")
    if accepts:
        datasets.check_data_is_that_of_the_checkpoint(run, resume)
        return
    with pytest.raises(DataError, match=r"iter_0000003: a\.bin has other content\. Put back what it was"):
        datasets.check_data_is_that_of_the_checkpoint(run, resume)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("reason", [None, "--exit-interval 5"])
def test_one_rank_watches_the_stop_file_and_a_stop_is_remembered(
    rank: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that was planned is no failure: a restart of the launch ends with 0, and at once."""
    heard: list[Any] = []
    run: Any = SimpleNamespace(rank=1, state=SimpleNamespace(iteration=5), progress=NOTHING, chunks=[])
    run.sharding, run.release_graph = SimpleNamespace(host_memory_flags=()), lambda: None
    run.loaders = SimpleNamespace(close=lambda: heard.append("close"))
    loop: Any = SimpleNamespace(fit=lambda: heard.append("fit"), stop_reason=reason)
    monkeypatch.setattr(build, "build_run", lambda *_: run)
    monkeypatch.setattr(standard, "standard_callbacks", lambda *_: [])
    monkeypatch.setattr(standard, "stop_file", lambda config: "folder/stop")
    monkeypatch.setattr(trainer, "Trainer", lambda *_: loop)
    monkeypatch.setattr(pretrain, "_load", lambda *_: None)
    monkeypatch.setattr(pretrain.launch, "remember_stop", lambda code, why: heard.append((code, why)))
    monkeypatch.setattr(pretrain.elastic, "dismiss_spares", lambda: heard.append("dismiss"))
    watcher = pretrain.SignalWatcher
    monkeypatch.setattr(pretrain, "SignalWatcher", lambda file, _: heard.append(file) or watcher())
    configured: Any = SimpleNamespace(config=small_config(), resume=None)
    here: Any = SimpleNamespace(kind="cpu")
    pretrain._build_and_train(configured, here, RunStatus(rank), NONE, None, ends_with(heard, "destroy"))
    remembered = [] if reason is None else [(0, reason)]
    assert heard == ["folder/stop" if rank == 0 else None, "fit", *remembered, "close", "destroy", "dismiss"]


@pytest.mark.parametrize("holds", ["nothing", "a record", "a folder named stop", "another job"])
def test_a_save_folder_is_made_this_jobs_own(holds: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of an earlier run no record stays; in a folder that is another's none is left, nor taken away."""
    (tmp_path / "exit.json").write_text("{}")
    status = RunStatus(0, save=str(tmp_path))

    def hold(save: str) -> None:
        if holds == "another job":
            raise ConfigurationError("it is held")

    monkeypatch.setattr(pretrain, "hold_until_exit", hold)
    if holds == "a folder named stop":
        (tmp_path / "stop").mkdir()
    if holds == "a record":
        (tmp_path / "stop").touch()  # a file stops the run, and is no folder
    refused = holds in ("a folder named stop", "another job")
    if refused:
        said = "it is held" if holds == "another job" else "holds a folder named stop, but a file of that name"
        with pytest.raises(ConfigurationError, match=said):
            pretrain._claim(str(tmp_path), status)
    else:
        pretrain._claim(str(tmp_path), status)
    assert (tmp_path / "exit.json").exists() is refused
    assert status.save == (None if refused else str(tmp_path))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("save", [None, "folder"])
def test_one_rank_claims_the_folder_before_anything_else(
    rank: int, save: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[Any] = []

    def install(*_: Any, **__: Any) -> None:
        heard.append("device")
        raise DataError("seen enough")

    monkeypatch.setattr(pretrain, "_claim", lambda save, status: heard.append(("claim", save)))
    monkeypatch.setattr(pretrain.hardware_queues, "prepare", lambda layout: "one queue is too few")
    monkeypatch.setattr(pretrain.device, "install", install)
    config = dataclasses.replace(small_config(), checkpoint=CheckpointConfig(save=save))
    typed: Any = SimpleNamespace(values={}, warnings=())
    configured: Any = SimpleNamespace(config=config, typed=typed, search=None, resume=None)
    with pytest.raises(DataError, match=r"^seen enough$"):
        pretrain._pretrain(configured, RunStatus(rank), NONE, ExitStack())
    assert heard == [*([("claim", save)] if save and rank == 0 else []), "device"]
    assert capsys.readouterr().err == ("warning: one queue is too few\n" if rank == 0 else "")


@pytest.mark.parametrize(
    ("resume", "load", "asked", "refused"),
    [
        (None, "ckpt", True, True),
        (None, "ckpt", False, False),
        (None, None, True, False),
        ("found", "ckpt", True, False),
    ],
)
def test_a_checkpoint_that_is_missing_ends_the_run_where_it_is_asked_for(
    resume: Any, load: str | None, asked: bool, refused: bool
) -> None:
    flags = CheckpointConfig(load=load, exit_on_missing_checkpoint=asked)
    if refused:
        with pytest.raises(ConfigurationError, match=r"^--load ckpt holds no checkpoint; name a folder that does"):
            pretrain._require_checkpoint(flags, resume)
    else:
        pretrain._require_checkpoint(flags, resume)


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        (None, "rank 0: done at iteration 5", ""),
        (
            "--exit-interval 5",
            "rank 0: stopped: --exit-interval 5 at iteration 5",
            "stopped: --exit-interval 5 at iteration 5\n",
        ),
    ],
)
def test_the_record_of_an_end_that_is_no_failure(
    reason: str | None, message: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain._record_end(RunStatus(0, save=str(tmp_path)), 5, reason)
    record = json.loads((tmp_path / "exit.json").read_text())
    assert {name: record[name] for name in ("code", "rank", "message", "iteration")} == {
        "code": 0,
        "rank": 0,
        "message": message,
        "iteration": 5,
    }
    assert capsys.readouterr().out == said


def test_what_the_banner_says_of_a_run_that_begins() -> None:
    run: Any = SimpleNamespace(
        device=SimpleNamespace(model_name="H200", backend="nccl"),
        state=TrainState(iteration=5, consumed_samples=40, scheduled_samples=32),
    )
    own = Extensions(loss=lambda logits: NOTHING)
    found = pretrain._begun(run, own, "flash 2")
    expected = Begun(
        device="H200", backend="nccl", iteration=5, consumed_samples=40, own=("loss",), attention="flash 2"
    )
    assert found == dataclasses.replace(expected, kernels=found.kernels)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_tells_warnings(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    pretrain._tell(["one", "two"])
    assert capsys.readouterr().err == ("warning: one\nwarning: two\n" if rank == "0" else "")


@pytest.mark.parametrize(
    ("format", "recipe", "lacks", "said"),
    [
        (None, "blockwise", {True: "no blocks", False: "no fp8"}, None),
        ("e4m3", "blockwise", {True: None, False: None}, None),
        ("e4m3", "rowwise", {True: "no blocks", False: None}, None),
        (
            "e4m3",
            "blockwise",
            {True: "no blocks", False: None},
            "--fp8-format e4m3 --fp8-recipe blockwise: no blocks; use --fp8-recipe rowwise, or leave --fp8-format out "
            "to train in bf16",
        ),
        (
            "hybrid",
            "blockwise",
            {True: "no blocks", False: "no fp8"},
            "--fp8-format hybrid --fp8-recipe blockwise: no blocks; leave --fp8-format out to train in bf16",
        ),
        (
            "hybrid",
            "rowwise",
            {True: "no blocks", False: "no fp8"},
            "--fp8-format hybrid --fp8-recipe rowwise: no fp8; leave --fp8-format out to train in bf16",
        ),
    ],
)
def test_products_in_fp8_that_a_device_does_not_have(
    format: str | None, recipe: str, lacks: dict[bool, str | None], said: str | None
) -> None:
    """What would work there is advised, and nothing else."""
    here: Any = SimpleNamespace(lacks_for_fp8=lambda blocks: lacks[blocks])
    training: Any = SimpleNamespace(fp8_format=format, fp8_recipe=recipe)
    if said is None:
        pretrain.require_fp8(training, here)
        return
    with pytest.raises(ConfigurationError) as raised:
        pretrain.require_fp8(training, here)
    assert str(raised.value) == said


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("asked", ["none", "full_iteration"])
def test_graphs_are_those_of_a_gpu_that_torch_finds(kind: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(pretrain, "_tell", said.extend)
    config = small_config(training={"cuda_graph_impl": asked})
    here: Any = SimpleNamespace(kind=kind)
    found = pretrain.graphs_of(here, config)
    lost = (kind, asked) == ("cpu", "full_iteration")
    assert found.training.cuda_graph_impl == ("none" if lost else asked)
    assert [("torch finds no GPU on this machine" in one) for one in said] == [True] * lost


@pytest.mark.parametrize("signalled", [False, True])
@pytest.mark.parametrize("for_good", [False, True])
def test_a_stop_by_a_signal_is_remembered_where_it_is_for_good(
    for_good: bool, signalled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An elastic run goes on with other machines. The graph is freed in any case, before the groups end."""
    heard: list[Any] = []

    def fit() -> None:
        signals.for_good = for_good
        if signalled:
            raise StoppedBySignal("stopped")

    run: Any = SimpleNamespace(rank=0, state=SimpleNamespace(iteration=5), progress=NOTHING, chunks=[])
    run.sharding = SimpleNamespace(host_memory_flags=("--optimizer-cpu-offload",))
    run.release_graph = lambda: heard.append("release")
    run.loaders = SimpleNamespace(close=lambda: heard.append("close"))
    signals = pretrain.SignalWatcher()
    for module, name, made in (
        (build, "build_run", run),
        (standard, "standard_callbacks", []),
        (trainer, "Trainer", SimpleNamespace(fit=fit, stop_reason=None)),
        (pretrain, "_load", None),
        (pretrain, "_begun", None),
        (pretrain, "banner", "the banner"),
        (pretrain, "SignalWatcher", signals),
    ):
        monkeypatch.setattr(module, name, lambda *_, made=made: made)
    monkeypatch.setattr(pretrain, "_record_end", lambda status, *given: heard.append(given))
    monkeypatch.setattr(pretrain.launch, "remember_stop", lambda *given: heard.append(given))
    monkeypatch.setattr(pretrain.elastic, "dismiss_spares", lambda: heard.append("dismiss"))
    configured: Any = SimpleNamespace(config=small_config(), resume=None)
    for kind in ("cpu", "cuda"):
        heard.clear()
        here: Any = SimpleNamespace(kind=kind)
        with pytest.raises(StoppedBySignal) if signalled else nullcontext():
            pretrain._build_and_train(configured, here, RunStatus(0), NONE, None, ends_with(heard, "destroy"))
        remembered = [(StoppedBySignal("stopped").exit_code, "stopped"), "dismiss"] if for_good else []
        ended = ["release", "close", "destroy", (5, None), "dismiss"]
        assert heard == (["release", *remembered] if signalled else ended)
        same = "warning: --optimizer-cpu-offload saves nothing with --device cpu: it is the same memory\n"
        assert capsys.readouterr().out == (same if kind == "cpu" else "") + "the banner\n"
