"""The options of the layout: how the ranks share the model and the batch."""

from dataclasses import dataclass

from megatron_ext.config.derived.sharding import FSDP, Scheme, scheme_of
from megatron_ext.config.schema.option import Need, ReadWith, free

_EXPERTS = ReadWith("num_experts", "without --num-experts there are no experts")
_ENGINES = ("1f1b", "interleaved-1f1b")
V_SHAPED = ("zbv", "dualpipe-v")
"""Schedules whose chunks lie on the ranks like a V: chunk v of one rank and chunk 2 PP - 1 - v."""
SPLIT_SCHEDULES = ("interleaved-zero-bubble", *V_SHAPED)
"""Schedules whose backward passes are split."""
SCHEDULES = (*_ENGINES, "gpipe", "looped-bfs", *SPLIT_SCHEDULES)
"""The named schedules of a pipeline."""
_WHOLE_SEQUENCE = ReadWith(
    "tensor_model_parallel_size", "with --tensor-model-parallel-size 1 every rank has the whole sequence", but=(1,)
)
_CONTEXT = ReadWith("context_parallel_size", "with --context-parallel-size 1 every rank has whole sequences", but=(1,))


@dataclass(frozen=True)
class LayoutConfig:
    """Options of the layout. World size = tensor x pipeline x context x data parallel size."""

    world_size: int = free(
        None,
        "Number of ranks; default $WORLD_SIZE, else 1. Give it to --dry-run to check a layout for N ranks.",
        at_least=1,
        at_most=1_048_576,
    )
    elastic: bool = free(
        False,
        "Train on as many of torchrun's ranks as the layout can use, by changing the data-parallel size, and wait "
        "where they are too few; for torchrun --nnodes MIN:MAX, where machines come and go.",
    )
    tensor_model_parallel_size: int = free(1, "Ranks that share each layer's matrices.", at_least=1)
    sequence_parallel: bool = free(
        False,
        "Shard norms and dropout along the sequence between the tensor-parallel ranks.",
        read_with=_WHOLE_SEQUENCE,
        dropped_unread=True,
    )
    sequence_parallel_keep_gathered: bool = free(
        False,
        "With --sequence-parallel, keep the gathered inputs of attention and MLP for the backward pass, which else "
        "gathers them again: fewer gathers, more memory.",
        read_with=_WHOLE_SEQUENCE,
        dropped_unread=True,
    )
    tp_comm_overlap: bool = free(
        False,
        "With --sequence-parallel, gather and sum one part of a layer's tokens while another is multiplied, by torch's "
        "operators over symmetric memory, on GPUs that read each other's memory. No GPU has measured it.",
        needs={True: [Need("sequence_parallel", True, "tokens that are gathered and summed")]},
        read_with=_WHOLE_SEQUENCE,
        dropped_unread=True,
        unread_on_cpu="processes have no symmetric memory, and products wait for what they send",
    )
    pipeline_model_parallel_size: int = free(1, "Ranks that share the layers, one stage after another.", at_least=1)
    context_parallel_size: int = free(1, "Ranks that share each sample's positions.", at_least=1)
    cp_comm_type: tuple[str, ...] = free(
        ("p2p",),
        "How context-parallel ranks exchange keys and values: p2p (a ring), all_gather, or a2a (each rank gets all "
        "positions of some heads); one for all layers, or one for each.",
        metavar="TYPE",
        read_with=_CONTEXT,
    )
    expert_model_parallel_size: int = free(
        1,
        "Expert-parallel size: ranks that share the experts of a layer, out of the data-parallel (and "
        "tensor-parallel) ranks.",
        at_least=1,
    )
    expert_tensor_parallel_size: int | None = free(
        None,
        "Ranks that share each expert's matrices; default the tensor-parallel size.",
        at_least=1,
        read_with=_EXPERTS,
        dropped_unread=True,
    )
    moe_token_dispatcher_type: str = free(
        "allgather",
        "How tokens reach their experts: gathered on every rank (allgather), or sent only to ranks that need them "
        "(alltoall).",
        choices=("allgather", "alltoall"),
        read_with=_EXPERTS,
    )
    num_layers_per_virtual_pipeline_stage: int | None = free(
        None, "Interleave: layers in each virtual stage (model chunk).", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = free(
        None,
        "Interleaved schedule: model chunks on each pipeline rank; an alternative to "
        "--num-layers-per-virtual-pipeline-stage.",
        at_least=1,
    )
    use_tp_pp_dp_mapping: bool = free(
        False, "Number ranks so that pipeline stages are neighbours and data-parallel ranks farthest apart."
    )
    decoder_first_pipeline_num_layers: int | None = free(
        None,
        "Layers of the first pipeline stage; the other stages share the rest evenly.",
        at_least=1,
    )
    decoder_last_pipeline_num_layers: int | None = free(
        None,
        "Layers of the last pipeline stage; the other stages share the rest evenly.",
        at_least=1,
    )
    account_for_embedding_in_pipeline_split: bool = free(
        False, "Count the embedding as a layer of the first pipeline stage, which then has one fewer."
    )
    account_for_loss_in_pipeline_split: bool = free(
        False, "Count the output layer and the loss as a layer of the last pipeline stage, which then has one fewer."
    )
    pipeline_model_parallel_layout: str | None = free(
        None,
        "What each stage (or virtual stage, in the order of a forward pass) holds: E embedding, t layer, L loss, "
        "| next, x*n and (...)*n repeat, as in 'Et*3|(tt|)*2tL'.",
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = free(
        None,
        "Interleave: microbatches that one virtual stage takes before the next one's turn; default the pipeline size.",
        at_least=1,
        metavar="N",
    )
    pipeline_schedule: str | None = free(
        None,
        "Order of the passes of a pipeline; default megatron-core's, 1f1b or with virtual stages interleaved-1f1b.",
        choices=SCHEDULES,
        read_with=ReadWith("pipeline_model_parallel_size", "one stage has no pipeline", but=(1,)),
    )
    no_overlap_p2p_communication: bool = free(
        False, "With interleaving, do not overlap pipeline sends and receives with computation."
    )
    use_distributed_optimizer: bool = free(False, "Shard the optimizer's state over the data-parallel ranks (ZeRO-1).")
    overlap_grad_reduce: bool = free(False, "Reduce gradients while the backward pass still runs.")
    overlap_param_gather: bool = free(
        False, "With the distributed optimizer, gather parameters while the next forward pass runs."
    )
    use_torch_fsdp2: bool = free(
        False,
        "Shard weights, gradients and optimizer state over the data-parallel ranks with torch's fully_shard.",
        computed_by_ours=True,
    )
    torch_fsdp2_no_reshard_after_forward: bool = free(
        False, "With FSDP2, keep a layer's gathered weights until its backward pass: fewer gathers, more memory."
    )
    torch_fsdp2_cpu_offload: bool = free(
        False, "With FSDP2, keep weights, gradients and optimizer state in host memory, and update there."
    )
    use_megatron_fsdp: bool = free(
        False,
        "Shard over the data-parallel ranks with megatron-core's FSDP, by --data-parallel-sharding-strategy.",
        computed_by_ours=True,
    )
    data_parallel_sharding_strategy: str | None = free(
        None,
        "With --use-megatron-fsdp: nothing (DDP), optimizer state (ZeRO-1), gradients too (ZeRO-2), weights too "
        "(ZeRO-3); default optim_grads_params.",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    outer_dp_sharding_strategy: str = free(
        "no_shard",
        "With --use-megatron-fsdp and several optimizer instances, across the copies: replicate the optimizer state, "
        "or divide it once more.",
        choices=("no_shard", "optim"),
    )
    num_distributed_optimizer_instances: int = free(
        1, "Copies of the sharded state: shard within groups of data-parallel ranks, replicate across them (HSDP)."
    )
    ddp_bucket_size: int | None = free(
        None, "Parameters in one bucket of the gradient reduction; default megatron-core's.", at_least=1
    )
    distributed_backend: str | None = free(
        None,
        "Backend of torch.distributed; default nccl on GPUs and gloo on CPU processes.",
        choices=("nccl", "gloo"),
        needs_gpu=("nccl",),
    )
    nccl_backend: str = free(
        "nccl-legacy",
        "Implementation of NCCL process groups: nccl-legacy, with a communicator for each pair of ranks that send to "
        "each other, or nccl2, torch's own default since 2.15, with one for each group.",
        choices=("nccl-legacy", "nccl2"),
        unread_on_cpu="gloo communicates",
    )
    distributed_timeout_minutes: float = free(
        10.0,
        "Minutes that a rank waits in a collective or for its data before the run ends and names the ranks that are "
        "missing.",
    )
    device: str = free(
        "auto", "What computes: GPUs, or CPU processes.", choices=("auto", "cuda", "cpu"), needs_gpu=("cuda",)
    )

    @property
    def virtual_pipeline_model_parallel_size(self) -> int:
        """Number of model chunks per pipeline rank; 1 without interleaving. It is resolved from either flag."""
        return self.num_virtual_stages_per_pipeline_rank or 1

    @property
    def table(self) -> str | None:
        """The schedule that is run as a table of torch's; None where megatron-core runs its own."""
        return None if self.pipeline_schedule in _ENGINES else self.pipeline_schedule

    @property
    def microbatch_group_size(self) -> int:
        """Number of microbatches that one virtual stage takes before the next one's turn."""
        return self.microbatch_group_size_per_virtual_pipeline_stage or self.pipeline_model_parallel_size

    @property
    def attends_in_parts(self) -> tuple[bool, ...]:
        """Whether attention is put together from parts of a sequence: one value for all layers, or one for each."""
        return tuple(self.context_parallel_size > 1 and kind != "a2a" for kind in self.cp_comm_type)

    @property
    def sharding(self) -> Scheme:
        """The sharding scheme: whether data-parallel ranks divide optimizer state, gradients and weights."""
        return scheme_of(self)

    @property
    def flags_that_divide_weights(self) -> list[str]:
        """The flags that were given, of those under which no rank keeps whole weights between steps (FSDP)."""
        return ["--" + flag.replace("_", "-") for flag in FSDP if getattr(self, flag)]

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that work on the same samples: TP x CP x PP."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks that share each expert's matrices; where nothing is said, those that share the layers'."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Number of ranks that hold the same experts."""
        stage = self.world_size // self.pipeline_model_parallel_size
        return stage // (self.expert_model_parallel_size * self.expert_tensor_size)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that hold the same part of the model and work on different samples."""
        return self.world_size // self.model_parallel_size
