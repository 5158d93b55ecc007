"""The samples of each step are written, in a file that its flag names."""

import json
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.train.pretrain import pretrain
from tests.support.small_runs import MODEL


def test_ids_are_those_of_the_samples_of_the_step(tmp_path: Path) -> None:
    """Four a step, without what is left out, under the number of the step."""
    pretrain([*MODEL, "--log-sample-ids", str(tmp_path / "ids.jsonl"), "--skip-samples", "5-6"])
    rows = [json.loads(line) for line in (tmp_path / "ids.jsonl").read_text().splitlines()]
    assert [(row["iteration"], [number for _, number in row["samples"]]) for row in rows] == [
        (1, [0, 1, 2, 3]),
        (2, [4, 7]),
        (3, [8, 9, 10, 11]),
    ]
    assert all(row["sources"] == ["mock"] for row in rows)


def test_a_file_that_cannot_be_opened_is_named_by_its_own_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigurationError, match=r"^--log-sample-ids .*/file/ids\.jsonl: Not a directory; give another path$"
    ):
        pretrain([*MODEL, "--log-sample-ids", str(tmp_path / "file" / "ids.jsonl")])
