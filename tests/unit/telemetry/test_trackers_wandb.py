"""Weights & Biases, with a recording stand-in for the package: the real one sends to a server."""

import json
import sys
from types import ModuleType

import pytest

from megatron_ext.config.schema import LoggingConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.telemetry.metrics import ValidationMetrics
from megatron_ext.telemetry.trackers import WandbWriter
from tests.support.samples import step

STAND_IN = """
calls = []
class Run:
    def log(self, values, step): calls.append(["log", step, values])
    def finish(self): calls.append(["finish"])
def init(**options):
    calls.append(["init", options])
    return Run()
"""
OPTIONS = LoggingConfig(wandb_project="p", wandb_exp_name="n", wandb_save_dir="d")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, in the package's place."""
    module = ModuleType("wandb")
    exec(STAND_IN, module.__dict__)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_run_begins_logs_and_finishes(wandb: ModuleType):
    writer = WandbWriter(OPTIONS, {"seed": 1})
    writer.write(step(lm_loss=2.5))
    writer.write(ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=0.0))
    writer.close()

    start, train, validation, end = wandb.calls
    assert start == ["init", {"project": "p", "name": "n", "entity": None, "dir": "d", "config": {"seed": 1}}]
    assert train[:2] == ["log", 10]
    assert json.loads(json.dumps(train[2])).items() >= {"lm loss": 2.5, "samples vs steps": 160}.items()
    assert validation == [
        "log",
        10,
        {"lm loss validation": 0.0, "lm loss validation ppl": 1.0, "samples vs steps": 160},
    ]
    assert end == ["finish"]


def test_each_name_goes_where_it_is_for(wandb: ModuleType) -> None:
    WandbWriter(LoggingConfig(wandb_project="p", wandb_exp_name="n", wandb_entity="e", wandb_save_dir="d"), {})
    WandbWriter(LoggingConfig(wandb_project="p"), {"seed": 0})
    (_, full), (_, bare) = wandb.calls
    assert full == {"project": "p", "name": "n", "entity": "e", "dir": "d", "config": {}}
    assert bare["config"] == {"seed": 0}
    assert (bare["name"] or None, bare["entity"], bare["dir"] or None) == (None, None, None)


def test_a_missing_package_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"--wandb-project p needs the wandb package.*pip install wandb"):
        WandbWriter(OPTIONS, {})
