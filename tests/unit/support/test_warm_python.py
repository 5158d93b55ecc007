"""The tests' own python, which is forked with torch loaded, behaves as one that is started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.warm_python import warm_python

PROGRAM = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["OWN"], sys.stdin.read(), "torch" in sys.modules)
print("to stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_words_folder_environment_streams_and_exit_code(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [warm_python(tmp_path / "bin")["PYTHON_EXEC"], *options, "program.py", "7", "a b"]
    environment = {**os.environ, "OWN": "variable"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, input="asked", capture_output=True, text=True, check=False
    )
    assert ended.stdout == f"['7', 'a b'] {tmp_path} variable asked True\n"
    assert (ended.stderr, ended.returncode) == ("to stderr\n", 7)


def test_it_is_no_other_python(tmp_path: Path) -> None:
    python = warm_python(tmp_path)["PYTHON_EXEC"]
    ended = subprocess.run([python, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
    assert ended.stdout == f"{sys.executable}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_ends_with_its_client(number: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    command = [warm_python(tmp_path / "bin")["PYTHON_EXEC"], "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        client.send_signal(number)
        assert client.wait(20) == -number
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
