"""Records what a benchmark's results say of the machine, and keeps them: NAME-DATE.json and .md in the folder
--output."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def heading() -> dict[str, Any]:
    """Return date, machine and commit. Call it before the measurement: it asks for the load."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": git.stdout.strip() or None,
        "machine": {
            "cpu": names[0] if names else platform.machine(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
        },
    }


def sentence(record: Mapping[str, Any]) -> str:
    """Return the heading in words."""
    about = record["machine"]
    return (
        f"{about['cpu']}, {about['cores']} cores, load average {about['load_average']} before the start, Python "
        f"{about['python']}, commit {record['commit']}."
    )


def keep(folder: Path, name: str, record: Mapping[str, Any], markdown: str) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{record['date']}"
    (folder / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(markdown)
