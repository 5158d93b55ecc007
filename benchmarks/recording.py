"""Records what a benchmark's results say of the machine, and keeps them: NAME-DATE.json and .md in the folder
--output."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


_PACKAGES = ("torch", "megatron-core")


def heading() -> dict[str, Any]:
    """Return date, machine, versions and commit. Call it before the measurement: it asks for the load."""
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
            "gpus": _gpus(),
        },
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _gpus() -> list[str]:
    """Return the names of the machine's GPUs, as its driver's tool lists them."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(words, capture_output=True, text=True, check=False)
    return listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def sentence(record: Mapping[str, Any]) -> str:
    """Return the heading in words."""
    about = record["machine"]
    versions = "".join(f", {name} {version}" for name, version in record.get("versions", {}).items())
    gpus = "".join(f"{number} x {name}, " for name, number in Counter(about.get("gpus", ())).items())
    return (
        f"{about['cpu']}, {about['cores']} cores, {gpus}load average {about['load_average']} before the start, Python "
        f"{about['python']}{versions}, commit {record['commit']}."
    )


def keep(folder: Path, name: str, record: Mapping[str, Any], markdown: str) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{record['date']}"
    (folder / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(markdown)


def tell(folder: Path | None, name: str, record: Mapping[str, Any], markdown: str) -> None:
    """Print the text, and write both files where there is a folder for them."""
    print(markdown)
    if folder is not None:
        keep(folder, name, record, markdown)
