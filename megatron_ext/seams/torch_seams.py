"""Seams of torch."""

from megatron_ext.seams.seam import Seam

_C10D = "torch.distributed.distributed_c10d"
_FSDP = "torch.distributed.fsdp._fully_shard"
_DCP = "torch.distributed.checkpoint"
_PIPELINES = "torch.distributed.pipelining.schedules"
_ATTENTION = "torch.ops.aten._scaled_dot_product_flash_attention"
_FSDP_BUFFERS = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"

TORCH = (
    Seam(
        "torch._dynamo",
        "a stand-in takes its place in a CPU process until something compiles; imported with torch's own functions in "
        "their places, at which it looks meanwhile",
    ),
    Seam(
        "torch._dynamo.decorators.disable",
        "answered by the stand-in: without a compiler every function is left alone",
        ("fn", "recursive", "wrapping"),
        called_by=("torch._compile._disable_dynamo",),
    ),
    Seam(
        "torch._dynamo.decorators.graph_break",
        "answered by the stand-in: without a compiler there is no graph",
        called_by=("torch.optim.optimizer._use_grad_for_differentiable",),
    ),
    Seam(
        "torch._dynamo.trace_rules.clear_lru_cache",
        "answered by the stand-in: without a compiler there is no cache",
        called_by=("torch.distributed.distributed_c10d.init_process_group",),
    ),
    Seam(
        "torch._disable_dynamo",
        "called: asks the compiler to leave a function alone when that is called first",
        ("fn", "recursive"),
    ),
    Seam(
        "parameter.__dynamo_disable",
        "not of parameters but of functions: the compiler's answer, removed when the compiler itself is imported",
        called_by=("torch._compile._disable_dynamo",),
    ),
    Seam(
        "torch._dynamo.config.recompile_limit",
        "raised: after so many kinds of arguments a compiled function is run operator by operator",
    ),
    Seam("torch.compile", "replaced while megatron-core is imported, where its fused functions cannot be compiled"),
    Seam(
        "torch.UntypedStorage._cdata",
        "the address of its c10::StorageImpl, which our C++ gives the memory of another one",
    ),
    Seam(
        "torch.nn.modules.module.Module._apply",
        "overridden: keeps the bias of experts in fp32 where weights become 16-bit",
        ("fn",),
    ),
    Seam("torch.cuda._lazy_call", "replaced on a CPU: calls back at once"),
    Seam("torch.cuda.memory._record_memory_history", "called for --record-memory-history", ("enabled",)),
    Seam("torch.cuda.memory._dump_snapshot", "called for --record-memory-history", ("filename",)),
    Seam("torch._foreach_norm", "called with a list, an order and a dtype: the norms of many gradients"),
    Seam("torch._foreach_copy_", "called with two lists, perhaps of other types: copies the second one into the first"),
    Seam("torch._foreach_mul_", "called with a list and a scalar tensor: scales many gradients"),
    Seam("torch._foreach_lerp_", "called with two lists and a number: moves many averages towards their weights"),
    Seam(
        "torch.Tensor._post_accumulate_grad_hooks",
        "a dictionary by which hooks are put in front of those already there; None without hooks",
        called_by=("torch.Tensor.register_post_accumulate_grad_hook",),
    ),
    Seam("torch.distributed.tensor.DTensor._local_tensor", "this rank's rows of a weight or gradient, without a copy"),
    Seam(f"{_FSDP}._fully_shard.FSDPModule._get_fsdp_state", "called once: the state of a unit, for its weights"),
    Seam(
        f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_groups",
        "the groups of a unit's weights, each with its fsdp_params",
        called_by=(f"{_FSDP}._fully_shard.FSDPModule.reshard",),
    ),
    Seam(
        f"{_FSDP}._fsdp_param.FSDPParam.all_gather_outputs",
        "emptied where an evaluation gathers other bytes than training does: torch then makes room anew",
        called_by=(f"{_FSDP}._fsdp_param.FSDPParam.init_all_gather_outputs",),
    ),
    Seam(
        "torch._C._current_graph_task_id", "-1 outside of a backward pass: a module that runs inside of one recomputes"
    ),
    Seam(
        "torch.nn.attention.varlen.varlen_attn",
        "public, but young: called on a GPU for packed documents, with enable_gqa where it has that",
        ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"),
    ),
    Seam("torch.utils._python_dispatch.TorchDispatchMode", "the parent of what counts traffic by operator"),
    Seam(
        f"{_PIPELINES}._add_send_recv",
        "called with a table of passes: puts receives where their sends are, so that no messages wait for each other",
        ("compute_actions", "stage_to_rank", "num_stages"),
    ),
    Seam(
        f"{_PIPELINES}._Action",
        "what a table has: stage_index, computation_type, microbatch_index, sub_actions",
        ("stage_index", "computation_type", "microbatch_index", "sub_actions"),
    ),
    Seam(f"{_PIPELINES}._ComputationType", "its values are the letters of a table"),
    Seam("torch._ops.OpOverload._schema", "the name and arguments of the operator of a collective"),
    Seam(
        "torch.distributed._symmetric_memory.get_symm_mem_workspace",
        "called to find out whether the GPUs of a group share memory; raises where they do not",
        ("group_name", "min_size"),
    ),
    Seam(
        "torch.ops.symm_mem.fused_all_gather_matmul",
        "called on GPUs: gathers along the first dimension while it multiplies; returns the gathered one, and a list",
        ("A", "Bs", "gather_dim", "group_name", "return_A"),
    ),
    Seam(
        "torch.ops.symm_mem.fused_matmul_reduce_scatter",
        "called on GPUs: multiplies while it sums over the ranks and scatters along the first dimension",
        ("A", "B", "reduce_op", "scatter_dim", "group_name"),
    ),
    Seam("torch.ops.mkldnn._linear_pointwise", "called for fp32 matrix products on a CPU, where torch has oneDNN"),
    Seam(
        "torch.ops.aten._softmax_backward_data",
        "its overload `out` writes the gradient of scores over that of their softmax",
        ("grad_output", "output", "dim", "input_dtype"),
    ),
    Seam(
        f"{_ATTENTION}_for_cpu",
        "called for the log-sum-exp that scaled_dot_product_attention keeps to itself",
        ("query", "key", "value", "dropout_p", "is_causal", "scale"),
    ),
    Seam(
        f"{_ATTENTION}_for_cpu_backward",
        "called for the gradients of one block of keys",
        ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "scale"),
    ),
    Seam(
        _ATTENTION,
        "called on a GPU for the log-sum-exp, which is its second result",
        ("query", "key", "value", "dropout_p", "is_causal", "return_debug_mask", "scale"),
    ),
    Seam(
        f"{_ATTENTION}_backward",
        "called on a GPU for the gradients of one block of keys",
        (
            *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
            *("dropout_p", "is_causal", "philox_seed", "philox_offset", "scale"),
        ),
    ),
)

REHEARSAL = (
    Seam("torch._subclasses.fake_tensor.FakeTensorMode", "tensors without memory, for a rank that is only played"),
    Seam(
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        'registers the backend "fake", whose collectives return at once',
    ),
)

COLLECTIVES = (
    Seam(
        "torch.distributed._coalescing_manager",
        "replaced on a CPU: gathers are issued one by one, for gloo's coalesced gather corrupts the heap",
        called_by=(_FSDP_BUFFERS,),
    ),
    Seam(f"{_C10D}._coalescing_manager", "the same, as torch defines it", ("group", "device", "async_ops")),
    Seam(
        f"{_C10D}._create_gloo_process_group",
        "replaced on a CPU, before torch looks it up for the first group: all groups share the first one's devices",
        ("opts", "backend_options"),
        newer=True,  # torch 2.11 has no function for it: each group has a device of its own
    ),
    Seam("torch.distributed.ProcessGroupGloo._Options", "made without arguments, for every group but the first"),
    Seam("torch.distributed.ProcessGroupGloo._Options._devices", "of the first group, given to every other one"),
    Seam("torch.distributed.ProcessGroupGloo._Options._threads", "two for each device, as torch has it"),
    Seam("torch.distributed.ProcessGroupGloo._Options._timeout", "a timedelta, of what the group does"),
    Seam(
        f"{_C10D}._get_default_group",
        "the group of a coalesced collective that names none; of all ranks, bound to a device or not",
    ),
    Seam(
        f"{_C10D}._process_group_name",
        "called for a group that this rank is not in, which torch only counts: names are numbers in this order",
        ("ranks", "use_hashed_name"),
        (f"{_C10D}._new_group_with_tag",),
    ),
    Seam(
        f"{_C10D}._world",
        "its pg_coalesce_state lists the collectives that wait, with op, tensor, dst_tensor and redop",
        called_by=(f"{_C10D}._coalescing_manager",),
    ),
    Seam(f"{_C10D}._resolve_process_group", "called with a name: the group of a functional collective"),
    Seam("torch.distributed.Work.wait", "wrapped on the class, to mark and time waits; called by name from Python"),
    Seam(
        "torch.distributed.ProcessGroup.allreduce",
        "wrapped on the class, as all public collectives there are, to mark and time them",
        called_by=(f"{_C10D}.all_reduce",),
    ),
    Seam("torch.distributed.ProcessGroup._allgather_base", "wrapped on the class, to mark and time gathers"),
    Seam("torch.distributed.ProcessGroup._reduce_scatter_base", "wrapped on the class, to mark and time reductions"),
    Seam(
        "torch.distributed.ProcessGroup._end_coalescing",
        "wrapped on the class, to mark and time what was put together",
        called_by=(f"{_C10D}._coalescing_manager",),
    ),
    Seam("torch._C._distributed_c10d._dump_nccl_trace", "called at a hang: what nccl-legacy's flight recorder holds"),
    Seam("torch._C._distributed_c10d._dump_fr_trace", "the same of nccl2, by the argument `backend`"),
    Seam("torch.distributed.ProcessGroup._get_backend", "called with a device: its name is that of the recorder"),
    Seam(
        f"{_C10D}.Backend._ensure_backend_registered",
        "called for nccl: reads TORCH_DIST_USE_NCCL2, unless a group has made it do so",
        ("name",),
        (f"{_C10D}._new_process_group_helper",),
        newer=True,
    ),
    Seam(
        f"{_C10D}.Backend._plugins", "its NCCL.creator_fn is the constructor that the variable has chosen", newer=True
    ),
    Seam(
        f"{_C10D}._create_nccl_process_group",
        "the constructor of nccl-legacy, which binds no device: groups are made by their members alone",
        called_by=(f"{_C10D}._register_builtin_nccl_backend",),
        newer=True,
    ),
    Seam(
        f"{_C10D}._create_nccl2_process_group",
        "the constructor of nccl2, recognized by its name; it binds the group of all ranks to a device",
        called_by=(f"{_C10D}._register_builtin_nccl_backend",),
        newer=True,
    ),
    Seam(
        "torch.distributed.ProcessGroup.bound_device_id",
        "what nccl2 sets: then every rank takes part in every group",
        called_by=(f"{_C10D}._nccl2_device", f"{_C10D}._new_process_group_helper"),
    ),
    Seam("torch.ops._c10d_functional", "the namespace of functional collectives, whose traffic is counted"),
    Seam("torch.ops._c10d_functional_autograd", "likewise of those that differentiate"),
    Seam("torch.ops._c10d_functional._wrap_tensor_autograd", "an operator there that sends nothing"),
    Seam("torch.ops.c10d._allgather_base_", "a gather, whose traffic is counted", ("output_tensor", "process_group")),
    Seam(
        "torch.ops.c10d._reduce_scatter_base_",
        "a reduction, whose traffic is counted",
        ("input_tensor", "process_group"),
    ),
)
