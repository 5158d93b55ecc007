"""Directions of `megatron-ext convert` that make checkpoints of ours, which plugins bring to the point `importers`."""

from dataclasses import dataclass

from megatron_ext.registry import brought


@dataclass(frozen=True)
class Importer:
    """A direction: reads another program's folder, and writes a checkpoint of iteration 0."""

    direction: str
    """As the command takes it: from-NAME."""

    read: str
    """"module:function" from the folder to read and the folder to write to the path of the checkpoint."""


def importers() -> dict[str, Importer]:
    """Return the importers by direction."""
    own = Importer("from-hf", "megatron_ext.plugins.huggingface.importer:import_huggingface")
    return {one.direction: one for one in (own, *brought("importers"))}
