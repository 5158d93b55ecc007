"""The flag that remembers which family of Hugging Face a model is of."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import free


@dataclass(frozen=True)
class FamilyFlags:
    """Options of families."""

    hf_model_type: str | None = free(
        None,
        "Type of a Hugging Face config.json as which the model is exported where it has that type's shape; a folder "
        "that a run or a checkpoint begins from gives its own. Default: the first that has it.",
        metavar="TYPE",
    )


FLAGS = (("checkpoint", FamilyFlags),)
"""The family of an export."""
