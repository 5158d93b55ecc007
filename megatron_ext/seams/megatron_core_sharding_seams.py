"""Seams of megatron-core: its data parallelism, its FSDP, its optimizers."""

from megatron_ext.seams.seam import Seam

_CORE = "megatron.core"
_BASE = f"{_CORE}.distributed.data_parallel_base._BaseDataParallel"
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_FSDP_BUFFERS = f"{_FSDP}.param_and_grad_buffer"
_DDP_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer"
_DDP = f"{_CORE}.distributed.distributed_data_parallel.DistributedDataParallel"
_WRAPPER = f"{_FSDP}.megatron_fsdp.MegatronFSDP"
_ADAPTER = f"{_CORE}.distributed.fsdp.mcore_fsdp_adapter.FullyShardedDataParallel"
_GROUP = f"{_DDP_BUFFERS}._ParamAndGradBucketGroup"

DATA_PARALLEL = (
    Seam(
        _BASE, "the type of every wrapped model chunk, and the constructor of our FSDP2 wrapper", ("config", "module")
    ),
    Seam(f"{_BASE}.zero_grad_buffer", "overridden for FSDP2: its gradients lie in no buffer"),
    Seam(
        f"{_BASE}.scale_gradients",
        "overridden for FSDP2: the division by the tokens of the global batch",
        ("scaling_factor",),
        (f"{_CORE}.distributed.finalize_model_grads",),
    ),
    Seam(
        f"{_BASE}.finish_grad_sync",
        "overridden for FSDP2 and Megatron-FSDP; a schedule's end calls it before gradients are scaled",
        called_by=(f"{_CORE}.distributed.finalize_model_grads",),
    ),
    Seam(f"{_DDP}.bucket_groups", "the groups of buckets whose reductions are watched"),
    Seam(f"{_DDP}.expert_parallel_bucket_groups", "the groups of buckets of experts whose reductions are watched"),
    Seam(
        f"{_DDP}._make_backward_post_hook",
        "overridden: the first gradient of a step is written, then the engine's hook does all but the addition",
        ("param",),
        (f"{_DDP}.__init__",),
    ),
    Seam(
        f"{_DDP_BUFFERS}._ParamAndGradBuffer.reset",
        "replaced on the instance: what the step before left there is not zeroed, but written over",
        called_by=(f"{_DDP}.zero_grad_buffer",),
    ),
    Seam(f"{_DDP_BUFFERS}._ParamAndGradBuffer.params", "the weights whose gradients a buffer has"),
    Seam(
        f"{_GROUP}.start_grad_sync",
        "replaced on the instance: before a reduction, zeroes where no gradient came, and norms for the watch",
        ("force_all_reduce",),
        (f"{_GROUP}.register_grad_ready",),
    ),
    Seam(
        f"{_GROUP}.grad_reduce_handle",
        "None until a reduction has started, so that its gradients are counted once",
        called_by=(f"{_GROUP}.finish_grad_sync",),
    ),
    Seam(
        f"{_GROUP}.start_param_sync",
        "replaced on the instance for gathers in eight bits; called with force_sync to gather weights as they are",
        ("force_sync",),
        (f"{_GROUP}.finish_param_sync", f"{_DDP}.start_param_sync"),
    ),
    Seam(
        f"{_GROUP}.param_gather_handle",
        "set to what is waited for before weights are read; None when no gather is under way",
        called_by=(f"{_GROUP}.finish_param_sync",),
    ),
    Seam(
        f"{_GROUP}.param_gather_dispatched",
        "set to True when a gather has begun, so that the first wait begins none",
        called_by=(f"{_GROUP}.finish_param_sync",),
    ),
    Seam(
        f"{_GROUP}.intra_distributed_optimizer_instance_group",
        "the ranks that divide the buckets of a group",
        called_by=(f"{_GROUP}.start_param_sync",),
    ),
    Seam(f"{_DDP_BUFFERS}._ParamAndGradBucket.param_data", "the bucket's weights; each rank owns an equal part"),
    Seam(
        f"{_GROUP}.finish_param_sync",
        "called to wait for a weight that is read outside of its owner's pass; wrapped where gathers are poisoned",
        ("skip_next_bucket_dispatch",),
    ),
    Seam(f"{_GROUP}.buckets", "the buckets of a group that is watched"),
    Seam(f"{_DDP_BUFFERS}._ParamAndGradBucket.params_list", "the weights of a bucket, in their order"),
    Seam(f"{_DDP_BUFFERS}._ParamAndGradBucket.param_to_index", "(start, end) of each weight in its bucket"),
    Seam(f"{_DDP_BUFFERS}._ParamAndGradBucket.grad_data", "the bucket's gradients, whose size is the bucket's"),
    Seam(
        f"{_CORE}.distributed.torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel.finish_grad_sync",
        "overridden: gradients that are added over tensor-parallel ranks wait on the device",
        ("force_all_reduce",),
    ),
    Seam(
        f"{_CORE}.distributed.torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel.ddp_config",
        "set by our FSDP2 wrapper, which does not call its parent's constructor",
    ),
)

MEGATRON_FSDP = (
    Seam(
        f"{_WRAPPER}._replace_param_with_raw_if_needed",
        "called to see the model's weights in place of their shards",
        ("self",),
    ),
    Seam(
        f"{_WRAPPER}.is_param_fsdp_distributed",
        "set to True to change between weights and shards, whatever the engine believes",
        called_by=(
            f"{_WRAPPER}._replace_param_with_raw_if_needed",
            f"{_WRAPPER}._replace_param_with_distributed_if_needed",
        ),
    ),
    Seam(
        f"{_WRAPPER}.finish_grad_sync",
        "called in our wrapper's own; the adapter sets it on the instance, and so do we",
        ("force_all_reduce",),
        (f"{_ADAPTER}.__init__",),
    ),
    Seam(
        f"{_WRAPPER}.install_optimized_model_weights",
        "called to compute with what was written into the rows",
        ("self",),
    ),
    Seam(f"{_WRAPPER}.start_param_sync", "called with force_sync after rows were written", ("force_sync",)),
    Seam(
        f"{_ADAPTER}.sync_rng_states_across_tp_group",
        "overridden by nothing: tensor-parallel ranks would draw the same dropout for different units",
        ("self",),
        (f"{_ADAPTER}.__init__",),
    ),
    Seam(f"{_WRAPPER}.all_gather_pipeline", "reset after the step, to free what was gathered"),
    Seam(
        f"{_FSDP_BUFFERS}.AllGatherPipeline.reset",
        "called so that modules outside of units are freed, too",
        ("preserve_non_fsdp_units",),
    ),
    *(
        Seam(f"{_FSDP_BUFFERS}.AllGatherPipeline.{name}", f"wrapped where gathers are poisoned: {why}")
        for name, why in (
            ("async_bucket_gather", "a gather begins"),
            ("wait_bucket_ready", "a gather has ended"),
            ("release_bucket", "what was gathered is freed"),
        )
    ),
    Seam(f"{_FSDP_BUFFERS}.ParamAndGradBuffer.optimizer_named_parameters", "what the optimizer updates, as DTensors"),
    Seam(f"{_FSDP_BUFFERS}.ParamAndGradBuffer.parameter_groups", "the buffers of weights and gradients, by group"),
    Seam(f"{_FSDP_BUFFERS}.ParamAndGradBuffer.param_to_param_group", "the group of a weight"),
    *(
        Seam(f"{_FSDP_BUFFERS}.ParameterGroup.{name}", why)
        for name, why in (
            ("params", "the weights of a group"),
            ("is_expert_param", "whether expert data parallelism divides the group"),
            ("model_weight_buffer", "the buffer of the weights that the model computes with"),
            ("main_weight_buffer", "the buffer of the fp32 masters; None for fp32 weights"),
            ("main_grad_buffer", "the buffer of the gradients"),
            ("hfsdp_helper_wbuf", "where copies are divided, the buffer of a rank's weights"),
            ("hfsdp_helper_gbuf", "where copies are divided, the buffer of a rank's gradients"),
        )
    ),
    Seam(
        f"{_FSDP_BUFFERS}.DataParallelBuffer._get_item_slice_in_shard",
        "called for the elements (start, stop) of a weight that this rank holds",
        ("item_id",),
    ),
    Seam(f"{_FSDP_BUFFERS}.DataParallelBuffer.param_idx", "the index of a weight in its buffer"),
    Seam(f"{_FSDP_BUFFERS}.DataParallelBuffer.temporary_bucket_allocator", "what holds gathered buckets"),
    Seam(f"{_FSDP_BUFFERS}.TemporaryBucketAllocator.buckets", "the gathered buckets that are not freed yet"),
    Seam("parameter.orig_param", "the weight that a sharded parameter stands for", (), (_FSDP_BUFFERS,)),
)

OPTIMIZERS = (
    Seam(
        f"{_CORE}.distributed.finalize_model_grads.reset_model_temporary_tensors",
        "set to ours, which without experts does not walk over all modules for what their routers counted",
        ("config", "model"),
        (f"{_CORE}.distributed.finalize_model_grads",),
    ),
    Seam(
        f"{_CORE}.optimizer.clip_grads.l2_norm_impl",
        "set to ours, which does not read every norm back to the host; called with a list of lists, returns a pair",
        ("chunk_size", "noop_flag", "tensor_lists", "per_tensor"),
        (f"{_CORE}.optimizer.clip_grads.get_grad_norm_fp32",),
    ),
    Seam(
        f"{_CORE}.optimizer.optimizer._multi_tensor_copy_this_to_that",
        "set to ours, which copies all tensors at once in place of one after another",
        ("this", "that", "overflow_buf"),
        (f"{_OPTIMIZER}.Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",),
    ),
    Seam(
        f"{_OPTIMIZER}.FP32Optimizer.prepare_grads",
        "overridden: gradients are this rank's rows; returns whether one is infinite",
        ("self",),
        (f"{_OPTIMIZER}.FP32Optimizer.step",),
    ),
    Seam(
        f"{_OPTIMIZER}.MegatronOptimizer.get_grads_for_grad_norm",
        "overridden for rows in host memory, whose norms are taken there",
        ("grad_norm_group",),
        (f"{_OPTIMIZER}.MegatronOptimizer.get_grad_norm",),
    ),
    Seam(
        f"{_OPTIMIZER}.MegatronOptimizer.grad_stats_parallel_group",
        "set to the ranks that hold one copy of the model together",
        called_by=(f"{_OPTIMIZER}.MegatronOptimizer.get_grad_stats_parallel_group",),
    ),
    Seam(
        f"{_OPTIMIZER}.MegatronOptimizer.tp_group",
        "set to the tensor-parallel ranks, of which one counts a replicated weight's norm",
        called_by=(f"{_OPTIMIZER}.MegatronOptimizer._filter_grads_for_norm",),
    ),
    Seam(
        f"{_OPTIMIZER}.MegatronOptimizer.expert_tp_group",
        "set to the tensor-parallel ranks: there are no experts under these schemes of sharding",
        called_by=(f"{_OPTIMIZER}.MegatronOptimizer._filter_grads_for_norm",),
    ),
    Seam(f"{_OPTIMIZER}.MegatronOptimizer.optimizer", "replaced: torch's optimizer in the engine's"),
    *(
        Seam(f"{_OPTIMIZER}.Float16OptimizerWithFloat16Params.{name}", why)
        for name, why in (
            ("float16_groups", "the 16-bit weights, by group"),
            ("fp32_from_float16_groups", "the fp32 masters of the 16-bit weights, in the same order"),
            ("fp32_from_fp32_groups", "the weights that are fp32 themselves"),
        )
    ),
    Seam(
        f"{_DISTRIBUTED}._copy_model_grads_to_main_grads",
        "overridden: gradients are this rank's rows; replaced on the instance for flat ranges, to copy all at once",
        ("self",),
        (f"{_OPTIMIZER}.MixedPrecisionOptimizer.prepare_grads",),
    ),
    Seam(
        f"{_DISTRIBUTED}._copy_main_params_to_model_params",
        "replaced on the instance: copies all masters into the weights at once in place of one after another",
        ("self",),
        (f"{_OPTIMIZER}.MixedPrecisionOptimizer.step_with_ready_grads",),
    ),
    Seam(
        f"{_OPTIMIZER}.MixedPrecisionOptimizer.reload_model_params",
        "overridden: rows are the masters, and the weights follow them",
        ("state_dict",),
    ),
    Seam(
        f"{_DISTRIBUTED}._get_model_param_range_map",
        'called for the elements ["param"] of a weight, a range with start and end, that this rank updates',
        ("param",),
    ),
    Seam(f"{_DISTRIBUTED}.model_param_group_index_map", "(group, index in it) of the shard of a weight"),
    Seam(f"{_DISTRIBUTED}.gbuf_ranges", "by buffer, dtype and bucket: what this rank has of it"),
    Seam(f"{_DISTRIBUTED}.buffers", "the gradient buffers, in the order of gbuf_ranges"),
    Seam(
        f"{_HYBRID}._init_sub_optimizers",
        "overridden to know afterwards which of the optimizers it made updates what",
        ("self",),
        (f"{_HYBRID}.__init__",),
    ),
    Seam(
        f"{_HYBRID}._get_sub_optimizer_param_groups",
        "overridden: the engine's decides by Tensor.is_cuda; returns groups on host and device, and maps between both",
        ("offload_fraction",),
        (f"{_HYBRID}._init_sub_optimizers",),
    ),
    Seam(f"{_HYBRID}.step", "overridden: masters get their storage back on the device before it", ("closure",)),
    Seam(
        f"{_HYBRID}.update_fp32_param_by_new_param",
        "overridden by nothing: masters are reloaded by our own function",
        ("self",),
    ),
    *(
        Seam(f"{_HYBRID}.{name}", why)
        for name, why in (
            ("param_to_inner_param", "what is updated in place of a parameter: itself or its copy on the host"),
            ("gpu_params_map_cpu_copy", "the copies on the host, by parameter"),
            ("sub_optimizers", "the optimizers it made"),
            ("cpu_optimizers", "those of them that update in host memory"),
        )
    ),
    *(
        Seam(f"parameter.{mark}", why, (), (f"{_CORE}.distributed.finalize_model_grads",))
        for mark, why in (
            ("main_grad", "a weight's gradient, where gradients are summed in fp32"),
            ("allreduce", "False on the weights of experts that have data-parallel groups of their own"),
            ("sequence_parallel", "True on weights whose gradients are added over tensor-parallel ranks"),
        )
    ),
    Seam(
        "parameter.is_managed_by_layer_wise_optimizer",
        "set while buffers are laid out: no rank's range cuts the weight",
        called_by=(f"{_CORE}.optimizer.param_layout",),
    ),
    Seam(
        "parameter.shared",
        "True on copies of tied weights, which count once in a norm",
        called_by=(f"{_CORE}.transformer.module.param_is_not_shared",),
    ),
    Seam(
        "parameter.tensor_model_parallel",
        "True on weights that tensor-parallel ranks divide",
        called_by=(f"{_CORE}.tensor_parallel.layers.param_is_not_tensor_parallel_duplicate",),
    ),
)
