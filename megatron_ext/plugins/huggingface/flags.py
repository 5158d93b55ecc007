"""The flag that exports the model at the end of a training."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import ReadWith, free


@dataclass(frozen=True)
class ExportFlags:
    """Options of exports."""

    export_hf_at_end: str | None = free(
        None,
        "Folder to which the model is exported for Hugging Face once the training has come to its planned end, as "
        "`megatron-ext convert to-hf` does; a model that no family has is refused before the training.",
        metavar="FOLDER",
        read_with=ReadWith("save", "without --save no checkpoint is left to export"),
    )


FLAGS = (("checkpoint", ExportFlags),)
"""The export at the end of a training."""
