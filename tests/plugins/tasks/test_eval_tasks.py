"""--eval-tasks: a list of tasks, and all that is wrong with one."""

from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.eval_tasks import EvalTask, read_eval_tasks


def test_a_list_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    text = f"""
    last:
      task: LAMBADA
      valid_data: {tmp_path}/a.jsonl
      strict_lambada: true
    wiki: {{task: PERPLEXITY, valid_data: ["{tmp_path}/a.jsonl"], overlapping_eval: 32}}
    token: {{task: LAMBADA, valid_data: "{tmp_path}/a.jsonl", strict_lambada: false}}
    """
    (tmp_path / "tasks.yaml").write_text(text)
    files = (f"{tmp_path}/a.jsonl",)
    assert read_eval_tasks(str(tmp_path / "tasks.yaml")) == [
        EvalTask("last", "LAMBADA", files, strict_lambada=True),
        EvalTask("wiki", "PERPLEXITY", files, overlapping_eval=32),
        EvalTask("token", "LAMBADA", files, strict_lambada=False),
    ]


def test_all_that_is_wrong_with_a_list_is_named(tmp_path: Path) -> None:
    text = """
    first: {task: GLUE, valid_data: nowhere.jsonl}
    second: {task: LAMBADA, valid_data: [], strict: true}
    third: 4
    fourth: {task: PERPLEXITY, valid_data: [], overlapping_eval: 0}
    """
    (tmp_path / "tasks.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_eval_tasks(str(tmp_path / "tasks.yaml"))
    said = "\n".join(caught.value.problems)
    for part in (
        "first: task is GLUE; choose PERPLEXITY, LAMBADA, MULTIPLE_CHOICE",
        "first: nowhere.jsonl is no file",
        "second: unknown strict; known are task, valid_data, overlapping_eval, strict_lambada",
        "third: give its task and valid_data",
        "fourth: no valid_data",
        "fourth: overlapping_eval is 0; give at least 1",
    ):
        assert part in said
