"""The pages of runs and pipelines, laid out by a browser for a telephone and for a wide screen."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.cli import plan
from megatron_ext.plan.simulated_timeline import equal_stages
from megatron_ext.plan.timeline_svg import as_page
from megatron_ext.telemetry.loss_curve import RunHistory
from megatron_ext.telemetry.run_page import run_page, runs_page
from tests.support.browser import CHROMIUM, NONE_HERE, measure

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NONE_HERE)


def a_run(steps: int) -> RunHistory:
    """A run whose speed falls when it goes on with more ranks, with samples that have long lines."""
    rows = [
        {
            "iteration": at,
            "lm_loss": 2 + 8 / math.sqrt(at) + 0.1 * math.sin(7 * at),
            "consumed_tokens": 2048 * at,
            "learning_rate": 3e-4 * (1 - at / steps / 2),
            "grad_norm": 0.5 + 0.2 * math.sin(at),
            "tokens_per_second": 9500.0 if at < steps * 0.9 else 2700.0,
            "world_size": 1 if at < steps * 0.9 else 8,
        }
        for at in range(1, steps + 1)
    ]
    samples = [
        {"iteration": steps, "samples": [{"prompt": "class A:", "text": "word" * 60 + "\n    def f(self): ..."}]}
    ]
    return RunHistory(rows, [{"iteration": steps, "validation_loss": 2.4}], samples=samples)


PAGES: dict[str, Callable[[], str]] = {
    "run": lambda: run_page(a_run(1200), "runs/quickstart/checkpoints", facts=["model            " + "word " * 60]),
    "short run": lambda: run_page(a_run(9), "runs/short"),
    "runs": lambda: runs_page({"a-run-with-a-rather-long-name-of-its-own": a_run(300), "other": a_run(100)}),
    "pipeline": lambda: as_page(equal_stages(4, 2, 8), ["stage 2 is slow: a microbatch takes 3 s there."]),
}


@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_and_no_texts_lie_on_each_other(name: str, width: int, tmp_path: Path) -> None:
    found = measure(PAGES[name](), width, tmp_path)
    assert found["scrolls"] == 0
    assert found["cut"] == []
    assert found["overlaps"] == []
    assert found["small"] == 0
    assert (tmp_path / f"page-{width}.png").stat().st_size > 5000


@pytest.mark.parametrize("width", [360, 1600])
def test_the_page_of_a_plan_is_readable(width: int, tmp_path: Path) -> None:
    model = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16"
    sizes = "--max-position-embeddings 2048 --global-batch-size 16 --pipeline-model-parallel-size 2"
    words = ["--world-size", "4", "--number", "12", "--html", str(tmp_path / "plan.html"), "--"]
    assert plan.main([*words, *model.split(), *sizes.split()]) == 0
    found = measure((tmp_path / "plan.html").read_text(), width, tmp_path)
    del found["height"]
    assert found == {"scrolls": 0, "cut": [], "overlaps": [], "small": 0}
