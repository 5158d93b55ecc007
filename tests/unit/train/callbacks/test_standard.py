"""Every flag of a callback or a sink arrives at the one that it is for: all of them at once, each with a value that no
other has, and then each of them left out alone."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint.local import writer
from megatron_ext.config.schema import Config
from megatron_ext.inference import files
from megatron_ext.train.callbacks import checkpointing, snapshots, standard, tasks
from megatron_ext.train.state import TrainState
from tests.support.small_models import small_config

EVERYTHING: dict[str, dict[str, Any]] = {
    "training": {
        "check_weight_hash_across_dp_replicas_interval": 11,
        "check_replicated_weights_interval": 12,
        "spike_threshold": 1.5,
        "manual_gc": True,
        "manual_gc_interval": 13,
        "eval_interval": 14,
        "eval_at_start": True,
        "start_eval_at_iter": 15,
        "eval_tasks": "tasks.json",
        "sample_interval": 16,
        "sample_prompts": "prompts.txt",
        "sample_tokens": 17,
        "exit_interval": 18,
        "exit_duration_in_mins": 19.0,
    },
    "layout": {"elastic": True},
    "data": {"verify_data": "background", "mock_data": False},
    "logging": {
        "log_communication_share": True,
        "log_straggler": True,
        "log_interval": 20,
        "tensorboard_log_interval": 21,
        "timing_log_level": 2,
        "log_throughput": True,
        "log_format": "short",
        "log_sample_ids": "ids.jsonl",
        "metrics_file": "metrics.jsonl",
        "tensorboard_dir": "events",
        "wandb_project": "wandb",
        "mlflow_experiment": "mlflow",
        "comet_project": "comet",
        "trackio_project": "trackio",
    },
    "profiling": {
        "record_schedule": True,
        "record_memory_history": True,
        "memory_snapshot_path": "memory.pickle",
        "profile_ranks": (1, 3),
    },
    "checkpoint": {
        "save": "folder",
        "save_interval": 22,
        "async_save": True,
        "non_persistent_save_interval": 23,
    },
}

CALLBACKS = [
    "Communication",
    "Schedule",
    "Status",
    "Stragglers",
    "Profiling",
    "Reporting",
    "MemoryHistory",
    "ReplicaCheck",
    "SpikeCheck",
    "GarbageCollection",
    "Evaluation",
    "DataCheck",
    "Tasks",
    "Samples",
    "SampleIds",
    "Timing",
    "Stopping",
    "Snapshots",
    "Checkpointing",
]
"""All callbacks in the order in which they hear of a step: what reports comes before what stops and saves."""

SINKS = ["TensorBoardWriter", "WandbWriter", "MlflowWriter", "CometWriter", "TrackioWriter", "Console", "MetricsFile"]

Made = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
"""The arguments of each thing that was made, by its name."""


class _Written(str):
    """A stand-in for TensorBoard's writer, which is told the arguments of the run apart."""

    told: Any = None

    def write_arguments(self, arguments: Any) -> None:
        self.told = arguments


def _config(**groups: dict[str, Any]) -> Config:
    config = small_config()
    for group, values in groups.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    return config


def _run(config: Config) -> Any:
    return SimpleNamespace(
        config=config,
        device="device",
        groups=SimpleNamespace(pp="stages"),
        rank=3,
        is_last_rank=True,
        loaders=SimpleNamespace(valid="valid", test="test"),
        timers="timers",
        state=TrainState(iteration=31, consumed_samples=32, consumed_tokens=33, scheduled_samples=34),
    )


def _made(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[list[Any], Made]:
    """The callbacks of a run, each by its name, and the arguments of all that was made for them."""
    made: Made = {}

    def recorded(module: Any, name: str) -> None:
        def make(*given: Any, **named: Any) -> Any:
            made[name] = (given, named)
            return _Written(name)

        monkeypatch.setattr(module, name, make)

    for name in (*CALLBACKS[:12], *CALLBACKS[14:17], *SINKS, "CommunicationClock", "tokenizer_of_run", "open_range"):
        recorded(standard, name)
    for name in ("read_eval_tasks", "share"):
        recorded(standard, name)
    monkeypatch.setattr(standard, "blocks_of_run", lambda config: (("blocks", config is run.config), "not known"))
    monkeypatch.setattr(
        standard, "StepProfiler", SimpleNamespace(from_config=lambda *given: made.update(StepProfiler=(given, {})))
    )
    for name in ("Tasks", "Samples", "model_of"):
        recorded(tasks, name)
    recorded(files, "read_prompts")
    recorded(writer, "SnapshotWriter")
    recorded(snapshots, "Snapshots")
    recorded(checkpointing, "Checkpointing")
    signals: Any = "signals"
    status: Any = "status"
    return standard.standard_callbacks(run, signals, status), made


def test_every_flag_arrives_where_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(**EVERYTHING)
    run = _run(config)
    callbacks, made = _made(monkeypatch, run)
    assert callbacks == CALLBACKS
    arguments = {
        field.name: getattr(getattr(config, group.name), field.name)
        for group in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, group.name))
    }
    [step_sinks, *_], _ = made["Reporting"]
    assert step_sinks[0].told == arguments, "TensorBoard's"
    assert made == {
        "CommunicationClock": (("device", "stages"), {}),
        "Communication": (("CommunicationClock",), {}),
        "Schedule": ((run,), {}),
        "Status": (("status",), {}),
        "Stragglers": (("CommunicationClock", run), {}),
        "StepProfiler": ((config, 3, "device"), {}),
        "open_range": ((config,), {}),
        "Profiling": ((None, "open_range"), {}),
        "Reporting": ((SINKS[:5], 21, SINKS[5:], 20, "CommunicationClock", "Stragglers"), {}),
        "TensorBoardWriter": (("events", 31, 32), {}),
        "WandbWriter": ((config.logging, arguments), {}),
        "MlflowWriter": ((config.logging, arguments), {}),
        "CometWriter": ((config.logging, arguments), {}),
        "TrackioWriter": ((config.logging, arguments), {}),
        "Console": ((), {"throughput": True, "form": "short"}),
        "MetricsFile": (("metrics.jsonl", 31), {}),
        "MemoryHistory": (("memory.pickle", 3, 20), {}),
        "ReplicaCheck": ((11, 12), {}),
        "SpikeCheck": ((1.5,), {}),
        "GarbageCollection": ((13, 14), {}),
        "Evaluation": (("valid", "test", 14, "metrics.jsonl"), {"at_start": True, "first": 15}),
        "share": ((("blocks", True),), {}),
        "DataCheck": (("share",), {}),
        "tokenizer_of_run": ((config,), {}),
        "model_of": ((run, "tokenizer_of_run"), {}),
        "read_eval_tasks": (("tasks.json",), {}),
        "Tasks": (("model_of", "read_eval_tasks", 14), {}),
        "read_prompts": (("prompts.txt",), {}),
        "Samples": (("model_of", "read_prompts", 16, 17), {}),
        "SampleIds": (("ids.jsonl", run), {}),
        "Timing": (("timers", 20), {}),
        "Stopping": (("signals", 18, 19.0), {"elastic": True}),
        "SnapshotWriter": ((run,), {}),
        "Snapshots": (("SnapshotWriter", 23, 22), {}),
        "Checkpointing": (("folder", 22), {"background": True}),
    }


ALONE: list[tuple[str, dict[str, Any], list[str], dict[str, Any]]] = [
    ("logging", {"log_communication_share": False}, [], {"Reporting": {4: None}}),
    ("logging", {"log_straggler": False}, ["Stragglers"], {"Reporting": {5: None}}),
    (
        "logging",
        {"log_straggler": False, "log_communication_share": False},
        ["Communication", "CommunicationClock", "Stragglers"],
        {"Reporting": {4: None, 5: None}},
    ),
    ("profiling", {"record_schedule": False}, ["Schedule"], {}),
    ("profiling", {"record_memory_history": False}, ["MemoryHistory"], {}),
    ("profiling", {"profile_ranks": (1, 2)}, ["MemoryHistory"], {}),
    ("profiling", {"profile_ranks": None}, [], {}),
    ("training", {"check_weight_hash_across_dp_replicas_interval": None}, [], {"ReplicaCheck": {0: None}}),
    ("training", {"check_replicated_weights_interval": None}, [], {"ReplicaCheck": {1: None}}),
    ("training", {"spike_threshold": None}, ["SpikeCheck"], {}),
    ("training", {"spike_threshold": 0.0}, [], {"SpikeCheck": {0: 0.0}}),
    ("training", {"manual_gc": False}, ["GarbageCollection"], {}),
    ("training", {"no_manual_gc_eval": True}, [], {"GarbageCollection": {1: 0}}),
    ("training", {"eval_at_start": False}, [], {"Evaluation": {"at_start": False}}),
    ("training", {"start_eval_at_iter": None}, [], {"Evaluation": {"first": 0}}),
    (
        "training",
        {"eval_interval": 0},
        [],
        {"Evaluation": {2: 0}, "GarbageCollection": {1: 0}, "Tasks": {2: 0}},
    ),
    ("training", {"eval_tasks": None}, ["Tasks", "read_eval_tasks"], {}),
    ("training", {"sample_interval": None}, ["Samples", "read_prompts"], {}),
    (
        "training",
        {"eval_tasks": None, "sample_interval": None},
        ["Samples", "Tasks", "model_of", "read_eval_tasks", "read_prompts", "tokenizer_of_run"],
        {},
    ),
    ("training", {"exit_interval": None}, [], {"Stopping": {1: None}}),
    ("training", {"exit_duration_in_mins": 0.0}, [], {"Stopping": {2: 0.0}}),
    ("layout", {"elastic": False}, [], {"Stopping": {"elastic": False}}),
    ("data", {"verify_data": "start"}, ["DataCheck", "share"], {}),
    ("data", {"verify_data": "off"}, ["DataCheck", "share"], {}),
    ("data", {"mock_data": True}, ["DataCheck", "share"], {}),
    ("logging", {"log_sample_ids": None}, ["SampleIds"], {}),
    ("logging", {"timing_log_level": 0}, ["Timing"], {}),
    ("logging", {"timing_log_level": 1}, [], {}),
    ("logging", {"metrics_file": None}, ["MetricsFile"], {"Reporting": {2: ["Console"]}, "Evaluation": {3: None}}),
    ("logging", {"tensorboard_dir": None}, ["TensorBoardWriter"], {"Reporting": {0: SINKS[1:5]}}),
    ("logging", {"wandb_project": None}, ["WandbWriter"], {"Reporting": {0: [SINKS[0], *SINKS[2:5]]}}),
    ("logging", {"mlflow_experiment": None}, ["MlflowWriter"], {"Reporting": {0: [*SINKS[:2], *SINKS[3:5]]}}),
    ("logging", {"comet_project": None}, ["CometWriter"], {"Reporting": {0: [*SINKS[:3], SINKS[4]]}}),
    ("logging", {"trackio_project": None}, ["TrackioWriter"], {"Reporting": {0: SINKS[:4]}}),
    ("logging", {"log_throughput": False}, [], {"Console": {"throughput": False}}),
    ("logging", {"log_format": "megatron"}, [], {"Console": {"form": "megatron"}}),
    ("checkpoint", {"non_persistent_save_interval": None}, ["SnapshotWriter", "Snapshots"], {}),
    ("checkpoint", {"save_interval": None}, [], {"Snapshots": {2: None}, "Checkpointing": {1: None}}),
    ("checkpoint", {"save": None}, ["Checkpointing"], {}),
    ("checkpoint", {"async_save": False}, [], {"Checkpointing": {"background": False}}),
]
"""Group and values that differ from EVERYTHING; what is not made then; what gets another argument, by its place or
name."""


@pytest.mark.parametrize(
    ("group", "values", "gone", "other"), ALONE, ids=["-".join(f"{n}={v}" for n, v in one[1].items()) for one in ALONE]
)
def test_a_flag_that_is_left_out_changes_its_own_part_alone(
    group: str, values: dict[str, Any], gone: list[str], other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, everything = _made(monkeypatch, _run(_config(**EVERYTHING)))
    run = _run(_config(**{**EVERYTHING, group: {**EVERYTHING[group], **values}}))
    callbacks, made = _made(monkeypatch, run)
    assert callbacks == [name for name in CALLBACKS if name not in gone]
    assert sorted(everything.keys() - made.keys()) == gone
    assert made.keys() <= everything.keys()
    for name, (given, named) in made.items():
        places, names = list(everything[name][0]), dict(everything[name][1])
        for place, value in other.get(name, {}).items():
            arguments: Any = places if isinstance(place, int) else names
            arguments[place] = value
        assert (_plain(given), named) == (_plain(places), names), name


def _plain(given: Any) -> list[Any]:
    """The arguments without run and configuration, which are other ones in each case."""
    return [one if isinstance(one, str | int | float | tuple | list | None) else "a part of the run" for one in given]


def test_other_ranks_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(_config(**EVERYTHING))
    run.is_last_rank = False
    callbacks, made = _made(monkeypatch, run)
    assert callbacks == CALLBACKS, "every rank has the same callbacks, which are collective"
    assert made["Reporting"] == (([], 21, [], 20, "CommunicationClock", "Stragglers"), {})
    assert not made.keys() & set(SINKS)


def test_the_stop_file_lies_where_the_run_is_saved() -> None:
    assert standard.stop_file(_config(checkpoint={"save": "folder"})) == Path("folder") / standard.STOP_FILE
    assert standard.stop_file(_config()) is None
