"""The flag that remembers which family of Hugging Face a model is of."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import free


@dataclass(frozen=True)
class FamilyFlags:
    """Options of families."""

    hf_model_type: str | None = free(
        None,
        "Type (model_type of config.json) under which the model is exported to Hugging Face, if it has that type's "
        "shape. Default: the type of the folder that the run or checkpoint began from, else the first type that "
        "fits.",
        metavar="TYPE",
    )


FLAGS = (("checkpoint", FamilyFlags),)
"""The family of an export."""
