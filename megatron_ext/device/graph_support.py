"""Finds out, without importing torch, whether the installed one can capture the passes of a step into a CUDA graph."""

import importlib.util
from pathlib import Path

_NEEDED = "def set_override_stale_capture_stream("
"""Source line of torch versions whose captures do not wait for streams on which autograd nodes were made before the
capture; hooks of weights are such nodes."""


def uncapturing_torch() -> str | None:
    """Return the version of the installed torch if it cannot, None if it can, or there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    # The function's own file: its release is in no document.
    file = Path(spec.origin).parent / "autograd" / "graph.py"
    if _NEEDED in file.read_text(encoding="utf-8"):
        return None
    from importlib import metadata  # which imports much

    return metadata.version("torch")
