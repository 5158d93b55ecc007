"""Translates Hugging Face Accelerate's YAML file, as `accelerate config` writes it."""

from megatron_ext.plugins.migrate.key_meanings import (
    FSDP,
    MIXED_PRECISION,
    OFF,
    RESUMED,
    SAME_NUMBERS,
    WEIGHTS_WHOLE,
    ZERO_STAGE,
    Cases,
    Default,
    Depends,
    Fact,
    Flags,
    Launch,
    NoCounterpart,
    Refused,
    Table,
    above_one,
    count_from,
    each_of,
    switch,
)

_BATCH = Refused(
    "texts differ on whether this counts one device or all: give --micro-batch-size (one device) and "
    "--global-batch-size (all, with accumulation)"
)
_TPU = Default("for TPUs alone")
_DISK = Refused("offloading to disk is not supported; write cpu, which keeps it in memory")
_NO_FP8 = Default("mixed_precision: fp8 alone reads it")
_PORT = Launch("--master-port {}", count_from(1))
_VALUES_OF_MEGATRON = (
    "decoder_last_pipeline_num_layers recompute_granularity recompute_method recompute_num_layers attention_backend "
    "expert_model_parallel_size expert_tensor_parallel_size attention_dropout hidden_dropout"
)
_SWITCHES_OF_MEGATRON = (
    "no_load_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim optimizer_cpu_offload "
    "use_precision_aware_optimizer attention_softmax_in_fp32 calculate_per_token_loss use_rotary_position_embeddings"
)
_BATCH_NORM = NoCounterpart("a GPT has no batch norm, so that there are no statistics to synchronize")

TABLE: Table = {
    "compute_environment": Cases(
        {"local_machine": Default("torchrun starts the ranks")},
        NoCounterpart("torchrun starts the ranks; examples/pretrain_gpu.sh does it on several machines"),
    ),
    "distributed_type": Cases(
        {
            "multi_gpu": Default("data parallelism is what ranks do without a flag"),
            "no": Default("one process"),
            "false": Default("one process"),
            "multi_cpu": Flags("--device cpu"),
            "fsdp": Default("fsdp_config says how"),
            "deepspeed": Default("deepspeed_config says how"),
            "megatron_lm": Default("megatron_lm_config says how"),
        },
        Refused("ranks are GPUs, or CPU processes with --device cpu"),
    ),
    "num_processes": Fact("world_size"),
    "gpu_ids": Cases(
        {"all": Default("every rank takes the GPU of its local rank")},
        Launch("CUDA_VISIBLE_DEVICES={} in the environment"),
    ),
    "num_machines": Launch("--nnodes {}", count_from(1)),
    "machine_rank": Launch("--node-rank {}", count_from(0)),
    "main_process_ip": Cases({"null": Default("one machine")}, Launch("--master-addr {}")),
    "main_process_port": Cases({"null": Default("torchrun finds a free port")}, _PORT),
    "rdzv_backend": Launch("--rdzv-backend {}"),
    "same_network": Default("the ranks reach each other, or torchrun fails"),
    "main_training_function": Default("pretrain_gpt.py is the program"),
    "mixed_precision": MIXED_PRECISION,
    **each_of("downcast_bf16 tpu_* commands command_file", _TPU),
    "use_cpu": switch("--device cpu"),
    "debug": NoCounterpart("a lost or late rank ends the run with exit code 76"),
    "enable_cpu_affinity": NoCounterpart("set it in the launch: numactl, or Slurm's --cpu-bind"),
    **each_of(
        "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version "
        "py_version sagemaker_* additional_args mpirun_config.*",
        NoCounterpart("torchrun starts the ranks"),
    ),
    "gradient_accumulation_steps": Fact("accumulation"),
    "dynamo_config.dynamo_backend": Cases(
        {"inductor": Flags("--torch-compile"), "no": OFF, "false": OFF}, NoCounterpart("the compiler is inductor")
    ),
    "dynamo_config.*": NoCounterpart("--torch-compile compiles the layers, in its own mode"),
    "fp8_config.fp8_format": Depends("mixed_precision", {"fp8": Flags("--fp8-format {}", str.lower)}, _NO_FP8),
    "fp8_config.*": Depends(
        "mixed_precision", {"fp8": Refused("the recipe is --fp8-recipe; leave it out of the file")}, _NO_FP8
    ),
    "deepspeed_config.zero_stage": ZERO_STAGE,
    "deepspeed_config.offload_optimizer_device": Cases({"none": OFF, "cpu": Flags("--optimizer-cpu-offload")}, _DISK),
    "deepspeed_config.offload_param_device": Depends(
        "deepspeed_config.zero_stage",
        {"3": Cases({"none": OFF, "cpu": Flags("--torch-fsdp2-cpu-offload")}, _DISK)},
        WEIGHTS_WHOLE,
    ),
    "deepspeed_config.gradient_accumulation_steps": Fact("accumulation"),
    "deepspeed_config.gradient_clipping": Flags("--clip-grad {}"),
    "deepspeed_config.zero3_init_flag": Default("no rank ever holds more than its own slices"),
    "deepspeed_config.zero3_save_16bit_model": Default("`megatron-ext convert to-hf` writes the whole model"),
    "deepspeed_config.deepspeed_multinode_launcher": Default("torchrun starts the ranks"),
    **each_of(
        "*_nvme_path deepspeed_hostfile deepspeed_*_filter deepspeed_moe_layer_cls_names",
        NoCounterpart("torchrun starts the ranks, layers need not be named, and nothing goes to a disk"),
        "deepspeed_config.",
    ),
    "deepspeed_config.deepspeed_config_file": NoCounterpart("import that file too: --from deepspeed"),
    "megatron_lm_config.megatron_lm_tp_degree": Fact("tensor"),
    "megatron_lm_config.megatron_lm_pp_degree": Fact("pipeline"),
    "megatron_lm_config.megatron_lm_num_micro_batches": Fact("accumulation"),
    "megatron_lm_config.megatron_lm_gradient_clipping": Flags("--clip-grad {}"),
    "megatron_lm_config.megatron_lm_recompute_activations": switch("--recompute-activations"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": switch("--sequence-parallel"),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": switch("--use-distributed-optimizer"),
    "megatron_lm_config.megatron_lm_context_parallel_size": above_one(Fact("context")),
    **{
        f"megatron_lm_config.megatron_lm_{name}": Flags(f"--{name.replace('_', '-')} {{}}")
        for name in _VALUES_OF_MEGATRON.split()
    },
    "megatron_lm_config.megatron_lm_use_custom_fsdp": switch("--use-megatron-fsdp"),
    **{
        f"megatron_lm_config.megatron_lm_{name}": switch(f"--{name.replace('_', '-')}")
        for name in _SWITCHES_OF_MEGATRON.split()
    },
    "parallelism_config.parallelism_config_dp_replicate_size": Fact("replicate"),
    "parallelism_config.parallelism_config_dp_shard_size": Fact("shard"),
    "parallelism_config.parallelism_config_tp_size": Fact("tensor"),
    "parallelism_config.parallelism_config_cp_size": above_one(Fact("context")),
    # Ulysses divides the sequence, and heads within attention, as --cp-comm-type a2a does: the numbers are the same.
    "parallelism_config.parallelism_config_sp_size": above_one(Fact("context")),
    **each_of(
        "cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
        SAME_NUMBERS,
        "parallelism_config.parallelism_config_",
    ),
    # Not Accelerate's own, but often written into the same file.
    "batch_size": _BATCH,
    "learning_rate": Flags("--lr {}", float),
    "resume_from_checkpoint": RESUMED,
    "save_strategy": Default("--save-interval counts steps"),
    "save_steps": Flags("--save-interval {}"),
    "sync_bn": _BATCH_NORM,
    "sync_bn_group_size": _BATCH_NORM,
    **FSDP,
}

IMPLIED: dict[str, str] = {}
DEFAULTS: dict[str, tuple[str, object]] = {}
SHADOWED: dict[str, str] = {}
DEFAULT_ACCUMULATION = 1
