"""A rank ends when its torchrun is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.resilience.launcher_watch import watch_launcher
from megatron_ext.resilience.process_end import RunStatus
from tests.support.forked import Forked

Begin = Callable[..., Forked]


def launch(variables: dict[str, str], iteration: int | None, save: Path) -> None:
    """A launcher, whose rank works for a while without it."""
    if os.fork() == 0:
        os.environ.update(variables)
        watch_launcher(RunStatus(rank=3, iteration=iteration, save=str(save)))
        print("works")
        time.sleep(2.0)
        print("has done its work")
        os._exit(0)
    time.sleep(600.0)


@pytest.mark.parametrize(
    ("iteration", "where"), [(7, "at iteration 7"), (0, "at iteration 0"), (None, "before the first step")]
)
def test_a_rank_ends_when_its_launcher_is_killed(
    iteration: int | None, where: str, tmp_path: Path, begin: Begin
) -> None:
    """Nobody has collected the launcher yet: its name is still there."""
    launcher = begin(launch, {"TORCHELASTIC_RUN_ID": "none"}, iteration, tmp_path)
    launcher.says("works")
    launcher.send_signal(signal.SIGKILL)
    _, last = launcher.ended()[1].splitlines()
    assert last.startswith(
        f"rank 3: the launcher (torchrun, process {launcher.pid}) is gone {where}, killed without a word to its ranks; "
        "nothing was saved."
    )
    record = json.loads((tmp_path / "exit.json").read_text())
    assert (record["code"], record["message"]) == (76, last)


def test_only_ranks_of_torchrun_end_with_who_started_them(tmp_path: Path, begin: Begin) -> None:
    """A process that a user starts from a shell may outlive the shell."""
    launcher = begin(launch, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, 7, tmp_path)
    launcher.says("works")
    launcher.send_signal(signal.SIGKILL)
    assert launcher.ended()[1] == "works\nhas done its work\n"


RANK = """
import time
from megatron_ext.resilience.launcher_watch import watch_launcher
from megatron_ext.resilience.process_end import RunStatus
watch_launcher(RunStatus(rank=0))
print("works", flush=True)
time.sleep(60.0)
"""


def launch_by_a_shell() -> None:
    command = ["sh", "-c", f"{sys.executable} -c '{RANK}'; echo the script goes on"]
    subprocess.run(command, env=os.environ | {"TORCHELASTIC_RUN_ID": "none"}, check=False)


def test_the_launcher_is_the_one_that_runs_python_and_no_shell_between(begin: Begin) -> None:
    launcher = begin(launch_by_a_shell)
    launcher.says("works")
    launcher.send_signal(signal.SIGKILL)
    assert f"the launcher (torchrun, process {launcher.pid}) is gone before the first step" in launcher.ended()[1]
