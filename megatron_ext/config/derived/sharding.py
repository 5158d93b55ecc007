"""Describes the sharding schemes: the state that data-parallel ranks divide, the flags that ask for it, and the
configurations that do not work with it.

The divided state determines when it is communicated: divided gradients layer by layer after each microbatch, others in
buckets after the last one; divided weights layer by layer for every pass, others, where the optimizer state is divided,
once a step. A new scheme is its flags in `schema/layout_flags.py`, its entry here, and its file in `sharding/`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Flag = Literal["use_distributed_optimizer", "use_torch_fsdp2", "use_megatron_fsdp"]
"""A field of the layout that asks for a scheme. DDP has none."""

FLAGS: tuple[Flag, ...] = get_args(Flag)
FSDP = FLAGS[1:]
"""The flags under which no rank keeps whole weights between steps, nor updates whole matrices."""


@dataclass(frozen=True, eq=False)
class Scheme:
    """One way to divide weights, gradients and optimizer state over data-parallel ranks.

    Attributes:
        values: fields of the layout, with the values that ask for it; one is its flag.
        implementation: `module:class` of its `Sharding`.
        weights, gradients, optimizer: whether each rank keeps a part of these.
        title: the planner's name of the scheme; without a title the planner does not choose it.
        overlaps: fields of the layout that the planner sets as well.
        divides_more: flags of a scheme that keeps less on each rank, for a run that does not fit.
        weights_in_fp32, gradients_in_fp32: whether these are fp32, whatever the compute type.
        between: when copies of the shards (--num-distributed-optimizer-instances) sum their gradients: the shards after
            each reduction, or once a step; or the whole gradients once a step.
        own: fields of the layout that only this scheme reads.
        ignores: fields that change nothing with it, and why.
        gathers_whole: returns why weights cannot be rounded before they are gathered, with what helps, or None.
        equal_rows: whether the ranks must have equally many rows of a weight that is.
        cannot: yields the problems of a resolved configuration with the scheme, in sentences with a setting that works.
    """

    values: Mapping[str, Any]
    implementation: str
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    title: str = ""
    overlaps: tuple[str, ...] = ()
    divides_more: str = ""
    weights_in_fp32: bool = False
    gradients_in_fp32: bool = False
    between: Literal["reductions", "steps", "whole steps"] = "reductions"
    own: tuple[str, ...] = ()
    ignores: Mapping[str, str] = field(default_factory=dict)
    gathers_whole: Callable[[Any], str | None] = lambda _: "no weights are gathered; use --use-distributed-optimizer"
    equal_rows: bool = False
    cannot: Callable[[Any], Iterator[str]] = lambda config: iter(())

    @property
    def flag(self) -> Flag | None:
        """The field of the layout that asks for it; None for DDP."""
        return next((flag for flag in FLAGS if flag in self.values), None)

    def shares(self, ranks: int) -> tuple[int, int, int]:
        """Return over how many of the ranks weights, gradients and optimizer state are divided.

        Source: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 5).
        """
        return ranks if self.weights else 1, ranks if self.gradients else 1, ranks if self.optimizer else 1


def _own_flags(layout: Any) -> str:
    """Return FSDP2's flags that are given."""
    given = (name for name in ("use_torch_fsdp2", *FSDP2.own) if getattr(layout, name))
    return " ".join(f"--{name.replace('_', '-')}" for name in given)


def _distributed_optimizer(config: Any) -> str:
    """Return the advice to take it in the place of FSDP2, with the optimizer where FSDP2 was to keep it."""
    offload = " --optimizer-cpu-offload" if config.layout.torch_fsdp2_cpu_offload else ""
    return f"--use-distributed-optimizer{offload} instead of {_own_flags(config.layout)}"


def _fsdp2_cannot(config: Any) -> Iterator[str]:
    layout, experts = config.layout, config.model.num_experts
    if layout.torch_fsdp2_cpu_offload and config.optimizer.optimizer_cpu_offload:
        yield (
            "--torch-fsdp2-cpu-offload keeps the optimizer's state where the weights are, in host memory, and "
            "--optimizer-cpu-offload would copy it there; leave --optimizer-cpu-offload out"
        )
    if layout.use_distributed_optimizer:
        yield (
            "--use-torch-fsdp2 shards the optimizer's state already, and --use-distributed-optimizer would shard it "
            "again; keep one of them"
        )
    if layout.ddp_bucket_size is not None:
        yield "--use-torch-fsdp2 gathers and reduces layer by layer, not in buckets; leave --ddp-bucket-size out"
    if (stages := layout.pipeline_model_parallel_size) > 1 and layout.torch_fsdp2_cpu_offload:
        yield (
            f"--torch-fsdp2-cpu-offload with --pipeline-model-parallel-size {stages}: where two stages have the word "
            "embeddings, their gradients are added up on the device, and these lie in host memory; leave "
            "--torch-fsdp2-cpu-offload out, or use --pipeline-model-parallel-size 1"
        )
    if experts is not None:
        yield (
            f"--use-torch-fsdp2 with --num-experts {experts}: experts are divided over other ranks than the rest, and "
            f"FSDP2 has one division; use {_distributed_optimizer(config)}"
        )
    if config.training.fp16:
        # Megatron-FSDP knows no experts next to stages, and keeps its masters on the device.
        on_device = not (layout.torch_fsdp2_cpu_offload or config.optimizer.optimizer_cpu_offload)
        is_able = on_device and stages == 1 and experts is None
        instead = f"--use-megatron-fsdp instead of {_own_flags(layout)}" if is_able else _distributed_optimizer(config)
        yield ("--use-torch-fsdp2 has no loss scaling, which --fp16 needs; use --bf16 instead of --fp16, or " + instead)


def _fsdp2_gathers_whole(config: Any) -> str | None:
    if config.layout.torch_fsdp2_cpu_offload:
        return "weights in host memory are gathered in bf16; leave --torch-fsdp2-cpu-offload out"
    return None


def _megatron_fsdp_cannot(config: Any) -> Iterator[str]:
    layout, experts = config.layout, config.model.num_experts
    if layout.use_torch_fsdp2:
        yield (
            "--use-megatron-fsdp divides what --data-parallel-sharding-strategy says, and --use-torch-fsdp2 would "
            "divide it again; keep one of them"
        )
    if (stages := layout.pipeline_model_parallel_size) > 1:
        yield (
            f"--use-megatron-fsdp with --pipeline-model-parallel-size {stages}: megatron-core's FSDP takes all ranks "
            "for data- and tensor-parallel ones, and knows no stages; use --pipeline-model-parallel-size 1, or "
            "--use-distributed-optimizer instead of --use-megatron-fsdp"
        )
    if config.optimizer.optimizer_cpu_offload:
        # FSDP2 has one division of all weights, and experts another.
        # It scales no loss, either.
        is_able = experts is None and not config.training.fp16
        instead = "--use-torch-fsdp2" if is_able else "--use-distributed-optimizer"
        yield (
            "--use-megatron-fsdp with --optimizer-cpu-offload: the fp32 masters lie in one buffer, of which no part "
            f"can leave the device by itself; use {instead} instead of --use-megatron-fsdp"
        )
    if experts is not None and layout.data_parallel_sharding_strategy == "no_shard":
        yield (
            f"--data-parallel-sharding-strategy no_shard with --num-experts {experts}: the gradients of experts are no "
            "replicas where those of the rest are, and there is one norm for both; use "
            "--data-parallel-sharding-strategy optim, or leave --use-megatron-fsdp and "
            "--data-parallel-sharding-strategy out"
        )
    if config.training.linear_cross_entropy:
        yield (
            "--linear-cross-entropy reads the output layer's weight itself, and --use-megatron-fsdp gathers it for the "
            "layer's own forward pass alone; leave --linear-cross-entropy out"
        )


DDP = Scheme(
    {},
    "megatron_ext.sharding.ddp:DataParallel",
    title="DDP",
    overlaps=("overlap_grad_reduce",),
    divides_more="--use-distributed-optimizer",
)
ZERO_1 = Scheme(
    {"use_distributed_optimizer": True},
    DDP.implementation,
    optimizer=True,
    title="ZeRO-1",
    overlaps=("overlap_grad_reduce", "overlap_param_gather"),
    divides_more="--use-torch-fsdp2 in place of --use-distributed-optimizer",
    gathers_whole=lambda _: None,
)
FSDP2 = Scheme(
    {"use_torch_fsdp2": True},
    "megatron_ext.sharding.fsdp2:FSDP2",
    *(True, True, True),
    title="FSDP2",
    weights_in_fp32=True,  # they are their own masters
    gradients_in_fp32=True,
    own=("torch_fsdp2_no_reshard_after_forward", "torch_fsdp2_cpu_offload"),
    ignores=dict.fromkeys(ZERO_1.overlaps, "--use-torch-fsdp2 overlaps its traffic layer by layer"),
    gathers_whole=_fsdp2_gathers_whole,
    equal_rows=True,
    cannot=_fsdp2_cannot,
)


def _megatron_fsdp(strategy: str, *divides: bool, between: Any = "steps", more: str = "", title: str = "") -> Scheme:
    why = "--use-megatron-fsdp divides what --data-parallel-sharding-strategy says, and overlaps its traffic layer by "
    why += "layer"
    return Scheme(
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy},
        "megatron_ext.sharding.megatron_fsdp:MegatronFSDP",
        *divides,
        title=title,
        divides_more=more,
        gradients_in_fp32=True,
        between=between,
        own=("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"),
        ignores=dict.fromkeys(("use_distributed_optimizer", *ZERO_1.overlaps, "ddp_bucket_size"), why),
        gathers_whole=lambda _: (
            "Megatron-FSDP gathers weights in bf16; use --use-torch-fsdp2 instead of --use-megatron-fsdp"
        ),
        cannot=_megatron_fsdp_cannot,
    )


SCHEMES = (
    DDP,
    ZERO_1,
    _megatron_fsdp("no_shard", more=DDP.divides_more),
    _megatron_fsdp("optim", False, False, True, between="whole steps", more=ZERO_1.divides_more),
    _megatron_fsdp("optim_grads", False, True, True, title="ZeRO-2"),
    _megatron_fsdp("optim_grads_params", True, True, True, title="ZeRO-3"),
    FSDP2,
)
"""The schemes, the simplest first. ZeRO-2 and ZeRO-3 are Megatron-FSDP's."""


def scheme_of(layout: Any) -> Scheme:
    """Return the scheme that a `LayoutConfig` asks for; of several that exclude each other, the last."""
    fields = vars(layout)
    return next(each for each in reversed(SCHEMES) if all(fields[name] == value for name, value in each.values.items()))


def given_schemes(values: Mapping[str, Any]) -> list[Scheme]:
    """Return for each flag that is given a scheme that it may ask for, from values by field name."""
    return [next(each for each in SCHEMES if each.flag == flag) for flag in reversed(FLAGS) if values.get(flag)]
