"""Prints the flags of ours that another program's configuration file means.

    python tools/import_config.py --from deepspeed ds_config.json --world-size 8
    python tools/import_config.py --from axolotl config.yaml

Prints the flags, the layout (world size, effective batch), and what became of every key: its flag, no flag needed, no
counterpart and why, or unknown. Exit codes: 0 done, 64 the file or its sizes cannot work.
"""

from megatron_ext.commandline import ToolParser
from megatron_ext.foreign.translate import KINDS, SOURCES, Translation, read, translate
from megatron_ext.terminal import say


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Print the flags that another program's configuration means.", __doc__)
    parser.add_argument("--from", required=True, choices=SOURCES, dest="source", help="whose configuration it is")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks, where the file does not say how many")
    parser.add_argument("file", help="the configuration file, JSON or YAML")
    options = parser.parse_args(argv)
    say(report(translate(options.source, read(options.file), options.world_size)))
    return 0


def report(translation: Translation) -> str:
    """Return the flags, the layout and what became of every key, as text."""
    flags = [f"    {flag} {value}".rstrip() for flag, value in translation.command.items()]
    parts = [["flags", *(flags or ["    none"])], ["layout", *(f"    {line}" for line in translation.layout.lines())]]
    for kind, title in KINDS.items():
        keys = [key for key in translation.keys if key.became == kind]
        if keys:
            parts.append([title if kind != "flags" else "keys that became flags"])
            for key in keys:
                value = "" if key.value == "" else f": {key.value}"
                parts[-1].append(f"    {key.name}{value} -> {'; '.join(filter(None, (key.flags, key.reason)))}")
    return "\n\n".join("\n".join(lines) for lines in parts)
