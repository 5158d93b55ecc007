"""Look into checkpoints.

    megatron-ext inspect-checkpoint checkpoints/run/iter_0000100          # show: its tensors, dtypes, L2 norms
    megatron-ext inspect-checkpoint ls checkpoints/run                    # the checkpoints of a folder
    megatron-ext inspect-checkpoint verify checkpoints/run/iter_0000100   # against its manifest
    megatron-ext inspect-checkpoint diff A B                              # which tensors differ, by how much

A --save folder stands for its latest checkpoint. `verify` exits with 65 for a damaged one, `diff` with 1 where the
two differ. Nothing in a checkpoint is run.
"""

import time
from pathlib import Path

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.checkpoint.native.checkpoint_folder import (
    checkpoint_at,
    find_latest,
    iteration_folder,
    saved_iterations,
    without_checkpoint,
)
from megatron_ext.commandline import ToolParser
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.terminal import say, warn


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    commands = {"ls": list_checkpoints, "show": show, "verify": verify, "diff": diff}
    parser = ToolParser("Look into checkpoints: [show] CKPT | ls DIR | verify CKPT | diff A B.", __doc__)
    parser.add_argument("command", choices=commands, help="show, where a path alone is given")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a checkpoint, or a --save folder")
    is_path = len(argv) == 1 and argv[0] not in commands and not argv[0].startswith("-")
    options = parser.parse_args(["show", *argv] if is_path else argv)
    wanted = 2 if options.command == "diff" else 1
    if len(options.paths) != wanted:
        raise ConfigurationError(f"{options.command} takes {wanted} path{'s'[: wanted - 1]}, not {len(options.paths)}")
    return commands[options.command](*options.paths)


def list_checkpoints(folder: Path) -> int:
    """Print one line for each checkpoint; the one to be loaded has a star."""
    latest = find_latest(folder)
    if latest is None:
        raise ConfigurationError(without_checkpoint(folder))
    if latest.warning:
        warn(latest.warning)
    for iteration in saved_iterations(folder):
        path = iteration_folder(folder, iteration)
        files = [entry for entry in path.iterdir() if entry.is_file()]
        size = sum(entry.stat().st_size for entry in files) / 1e9
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / "metadata.json").stat().st_mtime))
        star = "*" if path == latest.path else " "
        kept = "manifest" if (path / checkpoint_manifest.MANIFEST).exists() else "no manifest"
        say(f"{star} {path.name}  {size:10.3f} GB  {len(files):5d} files  {when}  {kept}")
    return 0


def show(path: Path) -> int:
    """Print the tensors of a checkpoint."""
    from megatron_ext import device

    device.install("cpu")
    from megatron_ext.plugins.checkpoint_tools.tensors import Tensors

    tensors = Tensors(_checkpoint(path))
    common = tensors.common()
    for name, value in {**common.get("train_state", {}), "adam_updates": common.get("optimizer_step")}.items():
        say(f"{name:<60} {value}")
    for name in tensors.names():
        dtype = str(tensors.dtype(name)).removeprefix("torch.")
        shape = " x ".join(map(str, tensors.shape(name)))
        say(f"{name:<60} {dtype:<9} {shape:<20} norm {tensors.read(name).double().norm():.6e}")
    return 0


def verify(path: Path) -> int:
    """Check a checkpoint against its manifest."""
    checkpoint = _checkpoint(path)
    started = time.perf_counter()
    try:
        files = checkpoint_manifest.read(checkpoint)
    except ValueError as error:
        raise DataError(f"{checkpoint}: {error}") from None
    if files is None:
        raise DataError(f"{checkpoint} has no manifest: whether it is damaged cannot be told")
    problems = checkpoint_manifest.problems(checkpoint, files)
    if problems:
        raise DataError(f"{checkpoint} is damaged: {'; '.join(problems)}")
    size, seconds = sum(entry["bytes"] for entry in files.values()) / 1e9, time.perf_counter() - started
    say(f"{checkpoint}: {len(files)} files are as they were written ({size:.3f} GB, {size / seconds:.1f} GB/s)")
    return 0


def diff(first: Path, second: Path) -> int:
    """Print which tensors differ, and by how much."""
    from megatron_ext import device

    device.install("cpu")
    from megatron_ext.plugins.checkpoint_tools.tensors import Tensors, differences

    one, other = Tensors(_checkpoint(first)), Tensors(_checkpoint(second))
    lines = list(differences(one, other))
    say("\n".join(lines) or f"identical: {len(one.names())} tensors")
    return 1 if lines else 0


def _checkpoint(path: Path) -> Path:
    checkpoint = checkpoint_at(path)
    if checkpoint is None:
        raise ConfigurationError(f"{path} is no checkpoint, and holds none; give iter_* or a --save folder")
    return checkpoint
