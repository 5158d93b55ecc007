"""Gaps, intervals and the picture of the learning benchmark; one model of each size starts."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import low_precision_learning
from benchmarks.low_precision_learning import COMMON, RUNS, SHAPES, corpus, gap, main, page, picture
from benchmarks.recording import heading
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.catalogue import count
from megatron_ext.rules.validate import problems

FOUND: Any = {
    "bf16": {"1": 2.0, "2": 2.1, "3": 2.2},
    "nvfp4": {"1": 2.02, "2": 2.13, "3": 2.21, "4": 9.0},
    "mxfp4": {"1": 2.3},
}


def test_a_gap_is_to_bf16_with_the_same_seed() -> None:
    mean, half, seeds = gap(FOUND, "nvfp4")
    assert (mean, seeds) == (pytest.approx(0.02), 3)
    assert half == pytest.approx(4.30 * 0.01 / math.sqrt(3))
    assert math.isnan(gap(FOUND, "mxfp4")[1])


def test_table_and_picture_have_every_run() -> None:
    drawn = picture({"1M dense": FOUND})
    assert [drawn.count(text) for text in ("<circle", "1M dense: nvfp4", "+0.020")] == [3, 1, 1]
    found = {**heading(), "steps": 10, "models": {"1M dense": FOUND}}
    assert "| 1M dense | nvfp4 | 3 | 3.8400 | +0.0200 ± 0.0248 |" in page(found)


@pytest.mark.parametrize(("size", "shape"), SHAPES)
def test_every_model_takes_every_format(size: str, shape: str) -> None:
    facts = Facts(vocab_size=257)
    for flags in RUNS.values():
        words = [*COMMON, *SHAPES[size, shape].split(), *flags.split(), "--train-iters", "10", "--mock-data"]
        config = resolve({**parse(words).values, "world_size": 1, "device": "cpu"}, facts)
        assert not problems(config, facts)
        assert count(config) == pytest.approx(float(size[0]) * 1e6, rel=0.25)
    assert len(corpus("HEAD")) > 1_000_000


def test_a_record_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another day, too: what the file has is not trained again, and the text stays the text of its commit."""
    trained: list[str] = []

    def measured(words: Sequence[str], steps: int) -> float:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(" ".join(words))
        return 2.0 + 0.01 * len(trained)

    monkeypatch.setattr(low_precision_learning, "measured", measured)
    arguments = ["--seeds", "2", "--steps", "10", "--only", "nvfp4$", "--output", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    [record] = tmp_path.glob("*.json")
    earlier = record.rename(tmp_path / "low_precision_learning-2026-01-02.json")
    begun = {**json.loads(earlier.read_text()), "date": "2026-01-02"}
    earlier.write_text(json.dumps(begun))
    first = [trained.pop() for _ in range(3)]
    assert main(arguments) == 0
    assert len(trained) == 1
    assert trained[0] not in first
    found = json.loads(earlier.read_text())
    assert found["text"] == begun["text"]
    assert {name: sorted(losses) for name, losses in found["models"]["1M dense"].items()} == {
        name: ["1234", "1235"] for name in ("bf16", "nvfp4")
    }
    with pytest.raises(ConfigurationError, match=re.escape("use --steps 10, or another")):
        main([*arguments, "--steps", "20"])


def test_what_is_there_is_drawn_without_a_run(tmp_path: Path) -> None:
    record = {**heading(), "text": "HEAD", "steps": 1000, "models": {"4M experts": FOUND}}
    stem = tmp_path / f"low_precision_learning-{record['date']}"
    stem.with_suffix(".json").write_text(json.dumps(record))
    assert main(["--seeds", "0", "--output", str(tmp_path)]) == 0
    assert "| 4M experts | nvfp4 | 3 |" in stem.with_suffix(".md").read_text()
    assert stem.with_suffix(".svg").read_text().count("<circle") == 3
