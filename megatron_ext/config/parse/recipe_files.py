"""Finds the recipes: YAML files of published models, whose first lines say what each is and which devices it is for.

path = find_recipe("llama3.1-8b")
heading(path).devices[0]     # 8 x H100
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import ConfigurationError

FOLDER = Path(__file__).parents[2] / "recipes"
"""Folder of the recipes, which an installed package has, too."""


@dataclass(frozen=True)
class Devices:
    """Devices that a recipe is meant for."""

    number: int
    name: str
    """A row of the planner's table, such as h100."""

    memory_gb: float | None
    """GB of one device; None: the table's."""

    def __str__(self) -> str:
        return f"{self.number:,} x {self.name.upper()}" + (f" {self.memory_gb:g} GB" if self.memory_gb else "")


@dataclass(frozen=True)
class Heading:
    """The comment at the top of a recipe."""

    title: str
    notes: Mapping[str, str]
    """Lines of the form `name: text`."""

    @property
    def devices(self) -> list[Devices]:
        """Devices that it is meant for, the fewest first; none where the model is not in the file."""
        found = re.findall(r"(\d+) x (\w+)(?: of (\d+) GB)?", self.notes.get("devices", ""))
        return [Devices(int(number), name, float(memory) if memory else None) for number, name, memory in found]


def recipe_paths() -> dict[str, Path]:
    """Return the recipes by name, in the order of their names."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe.

    Raises:
        ConfigurationError: there is none of this name.
    """
    known = recipe_paths()
    if name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else "`megatron-ext recipes` lists them"
        raise ConfigurationError(f"--recipe {name}: there is no such recipe; {hint}")
    return known[name]


def heading(path: Path) -> Heading:
    """Return the title and the notes of a recipe."""
    top = re.sub(r"\n#   ", " ", path.read_text(encoding="utf-8").partition("\n\n")[0])
    title, *lines = (line.removeprefix("# ") for line in top.splitlines())
    return Heading(title, dict(line.split(": ", 1) for line in lines))
