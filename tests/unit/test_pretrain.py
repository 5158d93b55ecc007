"""A run from its construction to its end, with stand-ins for model and loop: what is loaded, watched and remembered."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint.native import load
from megatron_ext.config.schema import CheckpointConfig
from megatron_ext.errors import DataError
from megatron_ext.parallel import groups
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.train import build, datasets, pretrain, trainer
from megatron_ext.train.callbacks import standard
from megatron_ext.train.extensions import NONE
from tests.support.small_models import small_config

NOTHING: Any = None


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
    run: Any = SimpleNamespace(rank=1, state=SimpleNamespace(iteration=5), progress=NOTHING)
    run.sharding, run.release_graph = SimpleNamespace(host_memory_flags=()), lambda: None
    run.loaders = SimpleNamespace(close=lambda: heard.append("close"))
    loop: Any = SimpleNamespace(fit=lambda: heard.append("fit"), stop_reason=reason)
    monkeypatch.setattr(build, "build_run", lambda *_: run)
    monkeypatch.setattr(standard, "standard_callbacks", lambda *_: [])
    monkeypatch.setattr(standard, "stop_file", lambda config: "folder/stop")
    monkeypatch.setattr(trainer, "Trainer", lambda *_: loop)
    monkeypatch.setattr(groups, "destroy", lambda: heard.append("destroy"))
    monkeypatch.setattr(pretrain, "_load", lambda *_: None)
    monkeypatch.setattr(pretrain.launch, "remember_stop", lambda code, why: heard.append((code, why)))
    monkeypatch.setattr(pretrain.elastic, "dismiss_spares", lambda: heard.append("dismiss"))
    watcher = pretrain.SignalWatcher
    monkeypatch.setattr(pretrain, "SignalWatcher", lambda file, _: heard.append(file) or watcher())
    configured: Any = SimpleNamespace(config=small_config(), resume=None)
    here: Any = SimpleNamespace(kind="cpu")
    pretrain._build_and_train(configured, here, RunStatus(rank), NONE, None)
    remembered = [] if reason is None else [(0, reason)]
    assert heard == ["folder/stop" if rank == 0 else None, "fit", *remembered, "close", "destroy", "dismiss"]
