"""The flags of products in eight and four bits, with Megatron's names and meaning."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import ReadWith, free

_FP8 = ReadWith("fp8_format", "without --fp8-format nothing is in FP8")
_FP4 = ReadWith("fp4_format", "without --fp4-format nothing is in FP4")
_LOW = ReadWith(("fp8_format", "fp4_format"), "without --fp8-format nothing is in FP8")
_IN_BF16 = ReadWith("first_last_layers_bf16", "without --first-last-layers-bf16 all layers are in FP8")


@dataclass(frozen=True)
class LowPrecisionFlags:
    """Options of products in eight and four bits."""

    fp8_format: str | None = free(
        None,
        "Multiply the linear layers of attention, MLP and experts in FP8 while they are trained: e4m3, or hybrid with "
        "output gradients in e5m2; on GPUs from compute capability 8.9 on, elsewhere with the same rounding.",
        choices=("e4m3", "hybrid"),
        untried_with_graphs=True,
        computed_by_ours=True,
    )
    fp8_recipe: str = free(
        "tensorwise",
        "What has one scale in FP8, its largest absolute value at each use: a tensor, a row of a product's factor, "
        "1 x 128 elements of activations and 128 x 128 of weights (blockwise, Hopper GPUs), or 32 elements (mxfp8, "
        "Blackwell GPUs).",
        choices=("tensorwise", "rowwise", "blockwise", "mxfp8"),
        refused={
            "delayed": "its scales come from the steps before, and here they are those of the tensor itself",
            "custom": "it names a function of Transformer Engine's",
        },
        read_with=_FP8,
        dropped_unread=True,
    )
    fp8_param_gather: bool = free(
        False,
        "With --use-distributed-optimizer or --use-torch-fsdp2, gather the weights that are multiplied in FP8 as FP8: "
        "each rank rounds its shard by the scales of the whole weight, and the numbers are the same as without.",
        read_with=_FP8,
        dropped_unread=True,
    )
    fp4_format: str | None = free(
        None,
        "Multiply the linear layers of attention, MLP and experts in FP4 while they are trained, on Blackwell GPUs, "
        "elsewhere with the same rounding.",
        choices=("e2m1",),
        untried_with_graphs=True,
        computed_by_ours=True,
    )
    fp4_recipe: str = free(
        "nvfp4",
        "What has one scale in FP4: 16 elements, with gradients rounded at random (nvfp4), or 32 elements (mxfp4).",
        choices=("nvfp4", "mxfp4"),
        refused={"custom": "it names a function of Transformer Engine's"},
        read_with=_FP4,
        dropped_unread=True,
    )
    first_last_layers_bf16: bool = free(
        False,
        "With --fp8-format or --fp4-format, leave the first and last layers of the model in --bf16.",
        read_with=_LOW,
        dropped_unread=True,
    )
    num_layers_at_start_in_bf16: int = free(
        1,
        "Layers at the start that --first-last-layers-bf16 leaves in --bf16.",
        at_least=0,
        read_with=_IN_BF16,
        dropped_unread=True,
    )
    num_layers_at_end_in_bf16: int = free(
        1,
        "Layers at the end that --first-last-layers-bf16 leaves in --bf16.",
        at_least=0,
        read_with=_IN_BF16,
        dropped_unread=True,
    )


FLAGS = (("training", LowPrecisionFlags),)
