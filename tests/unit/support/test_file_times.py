"""--file-times counts what a file's tests compute, in whichever process."""

from pathlib import Path

import pytest

from tests.support.file_times import FileTimes

FILE = """
import subprocess, sys, time

COMPUTE = "import time\\nwhile time.process_time() < {}: pass"


def test_here_and_in_a_process_that_ends():
    subprocess.run([sys.executable, "-c", COMPUTE.format(0.4)], check=True)
    exec(COMPUTE.format(time.process_time() + 0.3))


def test_that_waits():
    time.sleep(0.3)
"""


def test_a_files_tests_are_counted_with_the_processes_they_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_one.py").write_text(FILE)
    (tmp_path / "test_other.py").write_text("def test_nothing():\n    pass\n")
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tmp_path}"]
    assert pytest.main([*options, str(tmp_path)], plugins=[FileTimes()]) == 0
    rows = [line.split() for line in capsys.readouterr().out.partition("tests of each file")[2].splitlines()[1:4]]
    assert [(tests, name) for *_, tests, name in rows] == [("2", "test_one.py"), ("1", "test_other.py"), ("3", "all")]
    computed, passed = map(float, rows[0][:2])
    assert 0.6 <= computed < 1.5
    assert passed >= 0.9
