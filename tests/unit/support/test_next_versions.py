"""What tools/next_versions.sh says: on other versions of nothing, and where a change was planted."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_ext.errors import ConfigurationError
from tests.support import next_versions
from tests.support.losses import layouts

HERE = Path(sys.executable)


def test_the_newest_and_named_versions_are_asked_for_and_the_rest_stays() -> None:
    pinned = next_versions.pinned()
    assert pinned["torch"] == f"torch=={version('torch')}"
    wanted = next_versions.requirements({"torch": "2.13.0", "transformers": "newest"})
    changed = {"torch": "torch==2.13.0", "transformers": "transformers"}
    assert wanted == [changed.get(name, line) for name, line in pinned.items()]
    assert {*next_versions.NEWEST} <= {*pinned}


def test_versions_are_compared_with_the_installed_ones() -> None:
    found = {**dict.fromkeys(["pytest"], version("pytest")), "torch": "2.13.0", "no-such-package": "1"}
    assert next_versions.changed_versions(found) == [
        f"torch {version('torch')} -> 2.13.0",
        "no-such-package (none) -> 1",
    ]


@pytest.mark.parametrize(
    ("message", "text", "expected"),
    [
        ("Failed: torch.one does not exist.\nIt is called\nUsed at a.py:3", "", "does not exist. Used at a.py:3"),
        ("AssertionError: assert [1.0] == [2.0]\n +", "E  x", "AssertionError: assert [1.0] == [2.0]"),
        ("RankError: rank 1:\nTypeError: f() got\n", "", "TypeError: f() got"),
        ("", "x.py:3: in f\nE   ImportError: no g\n", "ImportError: no g"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_the_line_that_says_most(message: str, text: str, expected: str) -> None:
    case = ElementTree.Element("testcase", {"name": "test_canary[torch.one]"})
    ElementTree.SubElement(case, "failure", {"message": message}).text = text
    assert list(next_versions.failures([case])) == [("torch.one", expected)]


PLANTED = """
import pytest

@pytest.mark.parametrize("name", ["torch.one", "torch.two", "torch.three"])
def test_canary(name):
    if name != "torch.two":
        pytest.fail(f"{name} does not exist.\\nIt is called", pytrace=False)

def test_row():
    raise RuntimeError("rank 1:\\nTraceback\\nTypeError: f() got an unexpected keyword argument 'x'\\n")

def test_numbers():
    assert [1.0] == [2.0]

def test_skipped():
    pytest.skip("no GPU")
"""


@pytest.mark.full  # the test before
def test_tests_that_fail_are_named_with_the_reason(tmp_path: Path) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    found = next_versions.run_tests(HERE, "planted", [str(planted)])
    assert found.total == 6
    assert list(found.notes) == ["skipped: 1"]
    assert list(next_versions.lines(found.changed)) == [
        "2 of them: does not exist.",
        "  torch.one",
        "  torch.three",
        "test_row: TypeError: f() got an unexpected keyword argument 'x'",
        "test_numbers: assert [1.0] == [2.0]",
    ]


@pytest.mark.full  # the test of reasons
def test_a_run_that_cannot_begin_is_a_change(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import megatron.no_such_module\n")
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    found = next_versions.run_tests(HERE, "planted", [str(planted)])
    assert found.changed == [("all of them", "ModuleNotFoundError: No module named 'megatron.no_such_module'")]
    (tmp_path / "conftest.py").unlink()
    [(name, how)] = next_versions.run_tests(HERE, "planted", [f"{planted}::test_of_yesterday"]).changed
    assert name == "all of them"
    assert how.startswith("pytest ended with exit code 4: ")


def test_rows_and_tests_of_the_page_are_tests() -> None:
    rows = next_versions.parity_rows(3)
    assert len({*rows}) == 3
    assert all(row.startswith(f"{next_versions.PARITY}[") and row.endswith("]") for row in rows)
    named = next_versions.tests_of_the_page()
    assert len(named) > 30
    assert all((next_versions.ROOT / test.partition("::")[0]).exists() for test in named)
    assert not any("/seams/" in test for test in named)


@pytest.mark.full  # tests/distributed/test_golden_losses.py trains the same layouts
def test_a_loss_that_differs_is_named_with_its_step_and_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = next_versions.LOSSES.iterdir()
    kept = json.loads(file.read_text())
    numbers = kept["losses"]["one process"]["lm_loss"]
    before = float.fromhex(numbers[1])
    numbers[1] = (before * 1.001).hex()
    (tmp_path / file.name).write_text(json.dumps(kept))
    jobs: dict[str, Any] = {"one process": layouts.golden_jobs()["one process"]}
    monkeypatch.setattr(next_versions, "LOSSES", tmp_path)
    monkeypatch.setattr(layouts, "golden_jobs", lambda: jobs)
    versions = {name: version(name) for name in ("torch", "megatron-core")}
    found = next_versions.compare_losses(HERE, versions)
    [(name, how)] = found.changed
    assert name == "one process"
    assert how.startswith(f"number 2 of lm_loss is {numbers[1]} and ")
    assert abs(float(how.split()[-1].rstrip(")")) - before) <= 1e-6 * before


@pytest.mark.full  # a second of its own: makes an environment; the test of the requirements
def test_versions_that_do_not_go_together_are_an_error_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigurationError, match=r"(?s)no-such-package.*cannot be installed together; name others"):
        next_versions.make_environment(tmp_path, ["no-such-package==0"])


def test_a_flag_that_is_none_ends_the_script() -> None:
    command = ["bash", "tools/next_versions.sh", "--torhc", "2.13.0"]
    ended = subprocess.run(command, cwd=next_versions.ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 64
    assert "did you mean --torch?" in ended.stderr
