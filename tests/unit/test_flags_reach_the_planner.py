"""Every flag of the planner and of what draws pipelines arrives at the parameter that it is meant for."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.cli import draw_pipeline, plan
from megatron_ext.config.resolve import Facts
from megatron_ext.errors import ConfigurationError
from megatron_ext.plan.hardware import TABLE, Machine, constants_of
from megatron_ext.plan.search import Question
from tests.support.command_lines import line_of
from tests.support.requests import Requests


@pytest.fixture
def planned(requests: Requests) -> tuple[Requests, Question]:
    """The stand-ins of what plans, and what is asked of it."""
    facts = Facts(huggingface={"hidden_size": 5})
    asked = Question({"num_layers": 2}, facts, 24, Machine(TABLE["h200"]), 1.0)
    requests.take(plan, "hardware", TABLE["h200"])
    requests.take(plan, "gather_facts", facts)
    requests.take(plan, "read_hf_config", ("family", {"num_layers": 7, "ffn_hidden_size": 48}))
    requests.take(plan, "question", asked)
    requests.take(plan, "read_metrics", "measured")
    requests.take(plan, "placeholders", {"micro_batch_size": 21})
    requests.take(plan, "corrected", Machine(TABLE["a100"]))
    requests.take(plan, "saved_values", {"num_layers": 11})
    requests.take(plan, "_search", 3)
    requests.take(plan, "_evaluate", 5)
    return requests, asked


def test_plan(planned: tuple[Requests, Question]) -> None:
    requests, asked = planned
    assert plan.main(line_of("plan")) == 3
    assert requests.of("hardware") == {
        "name": "a100",
        "given": {
            "memory_gb": 33.0,
            "peak_16bit_tflops": 210.0,
            "peak_tf32_tflops": 210.0,
            "peak_fp32_tflops": 210.0,
            "memory_bandwidth_gb_s": 1234.0,
            "intra_node_gb_s": 77.0,
            "inter_node_gb_s": 11.0,
        },
    }
    machine = Machine(TABLE["h200"], 3, 0.41, 0.52, replace(constants_of(TABLE["h200"]), cores=13))
    model = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_hidden_size": 48}
    assert requests.of("question") == {
        "values": {**model, "num_layers": 2, "bf16": True, "grad_reduce_in_bf16": True},
        "facts": asked.facts,
        "world_size": 24,
        "machine": machine,
        "memory_share": 0.7,
    }
    assert [given["folder"] for name, given in requests.made if name == "read_hf_config"] == ["hf", "hf"]
    assert requests.of("read_metrics") == {"path": Path("m.jsonl")}
    assert requests.of("corrected") == {
        "machine": asked.machine,
        "values": {"hidden_size": 5, **model, "num_layers": 9, "micro_batch_size": 21},
        "facts": asked.facts,
        "measured": "measured",
    }
    found = requests.of("_search")
    assert found["asked"] == replace(asked, machine=Machine(TABLE["a100"]))
    assert (found["options"].number, found["options"].json) == (6, "found.json")
    assert found["typed"] == {"num_layers": 2, "bf16": True, "grad_reduce_in_bf16": True}


def test_plan_of_one_layout(planned: tuple[Requests, Question]) -> None:
    """The ranks may be named among the training flags; a calibration has the flags of the run's own checkpoint."""
    requests, asked = planned
    assert plan.main(line_of("plan", 1)) == 5
    assert (requests.of("question")["world_size"], requests.of("question")["values"]) == (12, {"num_layers": 2})
    assert requests.of("_evaluate")["asked"] == asked
    assert plan.main(["--calibrate", "m.jsonl", *line_of("plan", 1)]) == 5
    assert requests.of("corrected")["values"] == {"num_layers": 11}
    assert requests.of("saved_values") == {"metrics": Path("m.jsonl")}


@pytest.mark.parametrize("output", [None, "-", "found.json"])
@pytest.mark.parametrize("fits", [True, False])
def test_a_search_ends_with_whether_something_fits(
    fits: bool, output: str | None, monkeypatch: pytest.MonkeyPatch, requests: Requests
) -> None:
    best = [SimpleNamespace(choice="choice")] if fits else []
    answer = SimpleNamespace(best=best, nearest="nearest", fitting=3, legal=4)
    requests.take(plan, "search", answer)
    for name in ("fewest_ranks", "with_offloads", "with_short_gradients", "flags", "placeholders"):
        requests.take(plan, name)
    for name in ("hinges", "simpler_layouts", "alternatives"):
        requests.take(plan, name, [])
    requests.take(plan.report, "as_json", {"layouts": 2})
    for name in ("head", "nothing_fits", "table", "with_short_gradients", "simpler"):
        requests.take(plan.report, name, [name])
    for name in ("speed", "why", "command"):
        requests.take(plan.report, name, name)
    options = argparse.Namespace(number=6, json=output, limits=False)
    asked: Any = SimpleNamespace(world_size=5, machine="machine")
    assert plan._search(options, asked, {}) == (0 if fits else 1)
    assert requests.of("search") == {"question": asked, "number": 6}
    looked = [name for name, _ in requests.made if name in ("fewest_ranks", "with_offloads", "nothing_fits")]
    assert looked == ([] if fits or output == "-" else ["fewest_ranks", "with_offloads", "nothing_fits"])
    if looked:
        assert list(requests.of("fewest_ranks").values()) == [asked, 16 * 5]
    if output == "found.json":
        written = Path("found.json").read_text()
        assert written == '{\n "layouts": 2\n}\n'


def test_draw_pipeline(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    requests.take(draw_pipeline, "equal_stages", SimpleNamespace(lanes="lanes"))
    requests.take(draw_pipeline, "preview", SimpleNamespace(lanes="lanes"))
    requests.take(draw_pipeline, "as_text", ["text"])
    requests.take(draw_pipeline, "as_page", "page")
    requests.take(draw_pipeline, "slow_stages", ["slow"])
    requests.take(draw_pipeline.schedule_record, "read", "records")
    requests.take(draw_pipeline.schedule_record, "timeline", SimpleNamespace(lanes="lanes"))
    requests.take(draw_pipeline.schedule_record, "merged", "trace")
    assert draw_pipeline.main(line_of("draw-pipeline")) == 0
    assert requests.of("equal_stages") == {"stages": 3, "chunks": 2, "microbatches": 11, "group": 4}
    assert requests.of("as_text")["width"] == 90
    assert (Path("page.html").read_text(), requests.of("as_page")["remarks"]) == ("page", [])
    requests.made.clear()
    assert draw_pipeline.main(line_of("draw-pipeline", 1)) == 0
    assert requests.of("read") == {"run": Path("run")}
    assert requests.of("timeline") == {"records": "records", "iteration": 7, "pipeline": 1}
    assert requests.of("merged") == {"records": "records"}
    assert Path("trace.json").read_text() == "trace"
    model = "--num-layers 5 --hidden-size 24 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24 "
    model += "--vocab-size 100 --micro-batch-size 1 --global-batch-size 60 --attention-dropout 0 "
    layout = shlex.split(
        f"{model} --tensor-model-parallel-size 2 --context-parallel-size 3 --pipeline-model-parallel-size 5"
    )
    for words, ranks in ((line_of("draw-pipeline", 2), 60), (["--microbatches", "9", "--"], 30)):
        requests.made.clear()
        assert draw_pipeline.main([*words, *layout]) == 0
        drawn = requests.of("preview")
        assert (drawn["microbatches"], drawn["config"].layout.world_size) == (9, ranks)
        devices, each = (TABLE["a100"], 6) if ranks == 60 else (TABLE["h100"], 8)
        assert drawn["machine"] == Machine(devices, each, constants=constants_of(devices))


@pytest.mark.parametrize("flag", ["--stages", "--chunks", "--microbatches", "--group"])
def test_nothing_to_draw_is_no_default(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=r"are numbers from 1$"):
        draw_pipeline.main([*(["--stages", "3"] if flag != "--stages" else []), flag, "0"])
