"""Which test files a change concerns, in a small repository."""

import subprocess
from pathlib import Path

import pytest

from tests.support.changed import changed_files, concerned, main

FILES = {
    "megatron_ext/train/step.py": "",
    "megatron_ext/model/gpt.py": "from megatron_ext.train import step",
    "megatron_ext/cli/main.py": "def main():\n    import megatron_ext.model.gpt",
    "megatron_ext/plugins/mamba/compute.py": "",
    "tests/support/runs.py": "from megatron_ext.train.step import train_step",
    "tests/unit/train/test_other.py": "",
    "tests/unit/model/test_gpt.py": "from megatron_ext.model.gpt import GPT",
    "tests/unit/cli/test_main.py": "from megatron_ext.cli.main import main",
    "tests/plugins/mamba/test_compute.py": "",
    "tests/distributed/test_ranks.py": "from tests.support import runs",
    "tests/distributed/test_mixers.py": "FLAGS = '--mixer mamba'",
    "tests/distributed/test_page.py": "PAGE = 'docs/page.md'",
    "tests/parity/test_matrix.py": "",
    "tests/checks/test_names.py": "from megatron_ext.train import step",
    "docs/page.md": "",
    "pyproject.toml": "",
}
PARITY = "tests/parity/test_matrix.py"
CHANGES = {
    "megatron_ext/train/step.py": {
        "tests/unit/train/test_other.py",  # it lies with those of the file
        "tests/unit/model/test_gpt.py",  # it imports an importer
        "tests/distributed/test_ranks.py",  # its helper imports the file
        PARITY,
    },
    "megatron_ext/model/gpt.py": {"tests/unit/model/test_gpt.py", "tests/unit/cli/test_main.py", PARITY},
    "megatron_ext/plugins/mamba/compute.py": {
        "tests/plugins/mamba/test_compute.py",
        "tests/distributed/test_mixers.py",
        PARITY,
    },
    "tests/support/runs.py": {"tests/distributed/test_ranks.py"},
    "tests/unit/cli/test_main.py": {"tests/unit/cli/test_main.py"},
    "docs/page.md": {"tests/distributed/test_page.py"},
    "tests/checks/test_names.py": set(),
    "pyproject.toml": {name for name in FILES if "/test_" in name and "checks" not in name},
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("changed", CHANGES)
def test_a_change_concerns_its_room_its_importers_and_what_names_it(changed: str, repository: Path) -> None:
    assert concerned([changed], repository) == CHANGES[changed]


def test_what_is_changed_is_asked_of_git(repository: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=repository, check=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "first")
    assert changed_files("HEAD", repository) == set()
    (repository / "docs/page.md").write_text("new")
    (repository / "docs/other.md").write_text("new")
    assert changed_files("HEAD", repository) == {"docs/page.md", "docs/other.md"}
    git("checkout", "-qb", "branch")
    git("add", ".")
    git("commit", "-qm", "second")
    assert changed_files("HEAD", repository) == set()
    assert changed_files("main", repository) == {"docs/page.md", "docs/other.md"}
    with pytest.raises(subprocess.CalledProcessError):
        changed_files("nowhere", repository)


def test_a_commit_that_git_does_not_know_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere"]) == 64
    said = capsys.readouterr()
    assert (said.out, said.err.startswith("--changed nowhere: fatal: ")) == ("", True)
