"""megatron_ext/lasting_imports.py: nothing is collected meanwhile, and what there is then is left alone."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.lasting_imports import kept_from_the_collector

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count()))  # called last
from megatron_ext.lasting_imports import kept_from_the_collector
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


def test_what_fails_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "megatron.core"]:
        monkeypatch.delitem(sys.modules, name)
    gc.enable()  # the planner, which other tests of this process call, has switched it off
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), kept_from_the_collector():
        raise ImportError
    assert gc.isenabled()
    if not before:
        gc.unfreeze()
