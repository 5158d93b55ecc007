"""MLflow, Comet, Trackio and Weights & Biases, with stand-ins that record what their functions take."""

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from megatron_ext.config.schema import LoggingConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.trackers.trackers import CometWriter, MlflowWriter, TrackioWriter, WandbWriter
from megatron_ext.telemetry import metrics
from tests.support.samples import step

# Signatures of mlflow 3, comet_ml 3.49 and trackio 0.27.
MLFLOW = """
calls = []
def set_tracking_uri(uri): calls.append(["set_tracking_uri", uri])
def set_experiment(experiment_name=None, experiment_id=None): calls.append(["set_experiment", experiment_name])
def start_run(run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None,
              description=None, log_system_metrics=None):
    calls.append(["start_run", run_name])
def log_params(params, synchronous=None, run_id=None):
    assert len(params) <= 100 and all(len(str(value)) <= 500 for value in params.values()), "the server refuses it"
    calls.append(["log_params", params])
def log_metrics(metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None, dataset=None):
    import re
    assert all(re.fullmatch(r"[/\\w.\\- ]*", name) for name in metrics), "the server refuses it"
    calls.append(["log_metrics", step, metrics])
def end_run(status="FINISHED"): calls.append(["end_run", status])
"""
COMET = """
calls = []
class Experiment:
    def set_name(self, name): calls.append(["set_name", name])
    def log_parameters(self, parameters, prefix=None, nested_support=True, step=None):
        calls.append(["log_parameters", parameters])
    def log_metrics(self, dic, prefix=None, step=None, epoch=None): calls.append(["log_metrics", step, dic])
    def end(self): calls.append(["end"])
def start(api_key=None, workspace=None, project=None, project_name=None, experiment_key=None, mode=None, online=None,
          source=None, experiment_config=None):
    calls.append(["start", workspace, project_name])
    return Experiment()
"""
TRACKIO = """
calls = []
class Run:
    def log(self, metrics, step=None): calls.append(["log", step, metrics])
    def finish(self): calls.append(["finish"])
def init(project, name=None, group=None, space_id=None, space_storage=None, dataset_id=None, config=None,
         resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0):
    calls.append(["init", project, name, space_id, config, resume])
    return Run()
"""
WANDB = """
calls = []
class Run:
    def log(self, values, step): calls.append(["log", step, values])
    def finish(self): calls.append(["finish"])
def init(**options):
    calls.append(["init", options])
    return Run()
"""
WRITERS = {
    "mlflow": (MlflowWriter, MLFLOW),
    "comet_ml": (CometWriter, COMET),
    "trackio": (TrackioWriter, TRACKIO),
    "wandb": (WandbWriter, WANDB),
}
OPTIONS = LoggingConfig(
    mlflow_experiment="e",
    mlflow_run_name="n",
    mlflow_tracking_uri="http://host:5000",
    comet_project="c",
    comet_experiment_name="n",
    comet_workspace="w",
    trackio_project="t",
    trackio_run_name="n",
    wandb_project="p",
    wandb_exp_name="n",
    wandb_save_dir="d",
)
VALIDATION = {"lm loss validation": 0.0, "lm loss validation ppl": 1.0, "samples vs steps": 160}


Calls = Callable[..., list[list[Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Returns what a run of a step, an evaluation and a test asks of a package."""

    def run(package: str, arguments: dict[str, Any], options: LoggingConfig = OPTIONS) -> list[list[Any]]:
        writer, stand_in = WRITERS[package]
        module = ModuleType(package)
        exec(stand_in, module.__dict__)
        monkeypatch.setitem(sys.modules, package, module)
        sink = writer(options, arguments)
        sink.write(step(lm_loss=2.5))
        sink.write(metrics.ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=0.0))
        if package != "wandb":  # which is sent the samples alone
            sink.write(metrics.TestMetrics(iteration=10, consumed_samples=160, test_loss=0.0))  # has no tag
        sink.close()
        return module.calls

    return run


@pytest.mark.parametrize(
    ("package", "begin", "log", "end"),
    [
        (
            "mlflow",
            [
                ["set_tracking_uri", "http://host:5000"],
                ["set_experiment", "e"],
                ["start_run", "n"],
                ["log_params", {"seed": "1"}],
            ],
            "log_metrics",
            ["end_run", "FINISHED"],
        ),
        ("comet_ml", [["start", "w", "c"], ["set_name", "n"], ["log_parameters", {"seed": 1}]], "log_metrics", ["end"]),
        ("trackio", [["init", "t", "n", None, {"seed": "1"}, "allow"]], "log", ["finish"]),
        (
            "wandb",
            [["init", {"project": "p", "name": "n", "entity": None, "dir": "d", "config": {"seed": 1}}]],
            "log",
            ["finish"],
        ),
    ],
)
def test_a_run_begins_logs_and_ends(package: str, begin: list, log: str, end: list, calls: Calls) -> None:
    *begun, train, validation, ended = calls(package, {"seed": 1})
    assert begun == begin
    assert train[:2] == [log, 10]
    sent = json.loads(json.dumps(train[2]))
    assert sent.items() >= {"lm loss": 2.5, "tokens-per-second": 3277.8, "samples vs steps": 160}.items()
    assert validation == [log, 10, VALIDATION]
    assert ended == end


def test_mlflow_gets_no_more_than_its_servers_take(calls: Calls) -> None:
    arguments = {f"flag_{number}": "x" * 1000 for number in range(250)}
    made = calls("mlflow", arguments)
    sent = [call[1] for call in made if call[0] == "log_params"]
    assert [len(batch) for batch in sent] == [100, 100, 50]
    assert {name for batch in sent for name in batch} == set(arguments)


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("mlflow", "--mlflow-experiment e needs the mlflow package.*pip install mlflow"),
        ("comet_ml", "--comet-project c needs the comet_ml package.*pip install comet_ml"),
        ("trackio", "--trackio-project t needs the trackio package.*pip install trackio"),
        ("wandb", "--wandb-project p needs the wandb package.*pip install wandb"),
    ],
)
def test_a_missing_package_is_a_configuration_error(
    package: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=message):
        WRITERS[package][0](OPTIONS, {})


EACH = LoggingConfig(
    mlflow_experiment="experiment of mlflow",
    mlflow_run_name="run of mlflow",
    comet_project="project of comet",
    comet_experiment_name="experiment of comet",
    comet_workspace="workspace of comet",
    trackio_project="project of trackio",
    trackio_run_name="run of trackio",
    trackio_space_id="space of trackio",
    wandb_project="project of wandb",
    wandb_exp_name="run of wandb",
    wandb_entity="entity of wandb",
    wandb_save_dir="folder of wandb",
)
BARE = LoggingConfig(mlflow_experiment="e", comet_project="c", trackio_project="t", wandb_project="p")
_OF_WANDB = {"project": "project of wandb", "name": "run of wandb", "entity": "entity of wandb"}
_BARE_WANDB: dict[str, Any] = {"project": "p", "name": BARE.wandb_exp_name, "entity": None, "dir": BARE.wandb_save_dir}


@pytest.mark.parametrize(
    ("package", "full", "bare"),
    [
        (
            "mlflow",
            [["set_experiment", "experiment of mlflow"], ["start_run", "run of mlflow"]],
            [["set_experiment", "e"], ["start_run", None]],
        ),
        (
            "comet_ml",
            [["start", "workspace of comet", "project of comet"], ["set_name", "experiment of comet"]],
            [["start", None, "c"]],
        ),
        (
            "trackio",
            [["init", "project of trackio", "run of trackio", "space of trackio", {}, "allow"]],
            [["init", "t", None, None, {}, "allow"]],
        ),
        (
            "wandb",
            [["init", {**_OF_WANDB, "dir": "folder of wandb", "config": {}}]],
            [["init", {**_BARE_WANDB, "config": {}}]],
        ),
    ],
)
def test_each_name_goes_where_it_is_for(package: str, full: list, bare: list, calls: Calls) -> None:
    for options, begun in ((EACH, full), (BARE, bare)):
        made = calls(package, {}, options)
        assert [call for call in made[:-3] if call != ["log_parameters", {}]] == begun


def test_longer_values_than_a_server_takes_are_cut(calls: Calls) -> None:
    made = calls("mlflow", {"long": "x" * 501, "fits": "y" * 500, "number": 7})
    [sent] = [call[1] for call in made if call[0] == "log_params"]
    assert sent == {"long": "x" * 500, "fits": "y" * 500, "number": "7"}
