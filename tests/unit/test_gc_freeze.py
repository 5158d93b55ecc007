"""megatron_ext/gc_freeze.py: nothing is collected meanwhile, and what there is then is left alone."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.gc_freeze import kept_from_the_collector

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count()))  # called last
from megatron_ext.gc_freeze import kept_from_the_collector
seen = []
gc.collect()  # so that the next is not near
gc.callbacks.append(lambda phase, info: seen.append(phase))
with kept_from_the_collector():
    kept = [[] for _ in range(100_000)]
    print(gc.isenabled(), len(seen))
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
sys.modules["megatron.core"] = sys
gc.unfreeze()
with kept_from_the_collector():
    print(gc.isenabled())
print(gc.get_freeze_count())
gc.freeze()
"""


def test_imports_are_not_collected_and_given_back_at_the_end() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split("\n") == ["False 0", "True True", "True", "0", "0", ""]


_SERVER = """
import atexit, os
from megatron_ext.gc_freeze import end_at_once
end_at_once()

class Kept:
    def __del__(self):
        os.write(1, b"taken down")

kept = Kept()
atexit.register(lambda: print("handlers run"))
child = os.fork()
if child == 0:
    raise SystemExit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
raise SystemExit(1)
"""


def test_a_server_of_imports_takes_nothing_down_and_its_forks_end_as_they_do() -> None:
    ended = subprocess.run([sys.executable, "-c", _SERVER], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["handlers", "run", "taken", "down3", "handlers", "run"]


def test_what_fails_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "megatron.core"]:
        monkeypatch.delitem(sys.modules, name)
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), kept_from_the_collector():
        raise ImportError
    assert gc.isenabled()
    if not before:
        gc.unfreeze()
