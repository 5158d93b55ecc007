"""List the recipes: configurations of published models, each with a layout that fits its devices.

    megatron-ext recipes                # all of them
    megatron-ext recipes llama          # those that have to do with a word
    megatron-ext pretrain --recipe llama3.1-8b --dry-run
    torchrun --nproc-per-node 8 -m megatron_ext pretrain --recipe llama3.1-8b --data-path data/train ...

--recipe reads one as --config reads a file; flags, and --config, win over it. docs/recipes.md has memory and time.
"""

from megatron_ext.commandline import ToolParser
from megatron_ext.config.parse.recipe_files import heading, recipe_paths
from megatron_ext.errors import ConfigurationError
from megatron_ext.terminal import say


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("List the recipes of published models.", __doc__)
    parser.add_argument("word", nargs="?", default="", help="a word in the name, the title or the devices")
    word = parser.parse_args(argv).word
    rows = []
    for name, path in recipe_paths().items():
        top = heading(path)
        devices = ", ".join(map(str, top.devices)) or "any"
        if word.lower() in f"{name} {top.title} {devices}".lower():
            rows.append((name, devices, top.title))
    if not rows:
        raise ConfigurationError(f"no recipe has to do with {word!r}; `megatron-ext recipes` lists all of them")
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    say("\n".join(f"{name:<{widths[0]}}  {devices:<{widths[1]}}  {title}" for name, devices, title in rows))
    return 0
