"""plugins/tasks/harness.py with a stand-in for lm-evaluation-harness, which is not installed here."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_ext.plugins import tasks as inference


def _module(name: str, held: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(held)
    return module


def test_results_of_the_harness_are_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones too; names, and what it could not compute, are texts and are left out."""
    asked: list[dict[str, Any]] = []
    metrics = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": "N/A", "sample_len": 70}

    def simple_evaluate(**named: Any) -> dict[str, Any]:
        asked.append(named)
        return {"results": {"arc": metrics}}

    parts: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.instance": {"Instance": object},
        "lm_eval.api.model": {"LM": object},
        "lm_eval.tasks": {"TaskManager": lambda include_path: ("tasks of", include_path)},
    }
    for name, held in parts.items():  # as the module is, where it is installed
        monkeypatch.setitem(sys.modules, name, _module(name, held))
    spec = importlib.util.spec_from_file_location(
        "of_a_stand_in", Path(inference.__file__ or "").with_name("harness.py")
    )
    assert spec is not None
    assert spec.loader is not None
    harness = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(harness)
    monkeypatch.setattr(harness, "HarnessModel", lambda leader, rows: (leader, rows))
    found = harness.evaluate("leader", ("arc",), 3, include_path="folder", shots=5, limit=70)
    assert found == {"arc": {"acc,none": 0.5, "sample_len": 70}}
    [named] = asked
    assert (named["model"], named["tasks"], named["task_manager"]) == (("leader", 3), ["arc"], ("tasks of", "folder"))
    assert (named["num_fewshot"], named["limit"]) == (5, 70)
