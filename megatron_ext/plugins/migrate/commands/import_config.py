"""Prints the flags of ours that another program's configuration file means.

    megatron-ext import-config --from deepspeed ds_config.json --world-size 8
    megatron-ext import-config --from axolotl config.yaml

    megatron-ext import-config --from axolotl config.yaml --data-path data/train_alpaca_document

Prints the commands that make the data, the flags, the layout (world size, effective batch), and what became of every
key: its flag, no flag needed, or no counterpart and why. Exit codes: 0 done; 64 the file or its sizes cannot work, or a
key that the training depends on is not translated; 65 the data of --data-path is damaged.
"""

from functools import partial

from megatron_ext.commandline import ToolParser
from megatron_ext.data.integrity import check_indexed_files, share_of, token_count
from megatron_ext.data.mask import Mask
from megatron_ext.data.splits import split_bounds
from megatron_ext.data.stored import exists
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate.translate import KINDS, SOURCES, Translation, read, translate
from megatron_ext.terminal import say


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Print the flags that another program's configuration means.", __doc__)
    parser.add_argument("--from", required=True, choices=SOURCES, dest="source", help="whose configuration it is")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks, where the file does not say how many")
    parser.add_argument("--data-path", metavar="PREFIX", help="the preprocessed data, from which epochs become steps")
    parser.add_argument("file", help="the configuration file, JSON or YAML")
    options = parser.parse_args(argv)
    count = None if options.data_path is None else partial(samples_of_epoch, options.data_path)
    translation = translate(options.source, read(options.file), options.world_size, count)
    say(report(translation))
    if problems := translation.problems():
        raise ConfigurationError(problems)
    return 0


def samples_of_epoch(prefix: str, seq_length: int, split: str) -> int:
    """Return how many samples a pass over the training data has, where a mask or not stands next to it.

    Raises:
        ConfigurationError: the data is missing, or has no share for training.
        DataError: the data is damaged.
    """
    check_indexed_files(prefix)
    bounds = split_bounds(split)[0]
    if bounds is None:
        raise ConfigurationError(f"--split {split} has no share for training; give another val_set_size")
    share = share_of(prefix, bounds)
    is_packed = exists(prefix, ".mask") and Mask(prefix, token_count(prefix)).packed_to > 0
    return max(1, (share.tokens - (0 if is_packed else 1)) // seq_length)


def report(translation: Translation) -> str:
    """Return the flags, the layout and what became of every key, as text."""
    flags = [f"    {flag} {value}".rstrip() for flag, value in translation.command.items()]
    parts = [["before", *(f"    {line}" for line in translation.preparing)]] if translation.preparing else []
    parts += [["flags", *(flags or ["    none"])], ["layout", *(f"    {line}" for line in translation.layout.lines())]]
    for kind, title in KINDS.items():
        keys = [key for key in translation.keys if key.became == kind]
        if keys:
            parts.append([title if kind != "flags" else "keys that became flags"])
            for key in keys:
                value = "" if key.value == "" else f": {key.value}"
                parts[-1].append(f"    {key.name}{value} -> {'; '.join(filter(None, (key.flags, key.reason)))}")
    return "\n\n".join("\n".join(lines) for lines in parts)
