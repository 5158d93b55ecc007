"""Translates Hugging Face Accelerate's YAML file, as `accelerate config` writes it."""

from megatron_ext.foreign.key_meanings import (
    FSDP,
    MIXED_PRECISION,
    OFF,
    ZERO_STAGE,
    Cases,
    Default,
    Fact,
    Flags,
    Launch,
    NoCounterpart,
    Table,
    only_off,
    switch,
)

_BATCH = NoCounterpart(
    "texts differ on whether this counts one device or all: give --micro-batch-size (one device) and "
    "--global-batch-size (all, with accumulation)"
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
        NoCounterpart("ranks are GPUs, or CPU processes with --device cpu"),
    ),
    "num_processes": Fact("world_size"),
    "gpu_ids": Cases(
        {"all": Default("every rank takes the GPU of its local rank")},
        Launch("CUDA_VISIBLE_DEVICES={} in the environment"),
    ),
    "num_machines": Launch("--nnodes {}"),
    "machine_rank": Launch("--node-rank {}"),
    "main_process_ip": Cases({"null": Default("one machine")}, Launch("--master-addr {}")),
    "main_process_port": Cases({"null": Default("torchrun finds a free port")}, Launch("--master-port {}")),
    "rdzv_backend": Launch("--rdzv-backend {}"),
    "same_network": Default("the ranks reach each other, or torchrun fails"),
    "main_training_function": Default("pretrain_gpt.py is the program"),
    "mixed_precision": MIXED_PRECISION,
    "downcast_bf16": only_off("for TPUs alone"),
    "tpu_use_cluster": only_off("for TPUs alone"),
    "tpu_use_sudo": only_off("for TPUs alone"),
    "tpu_env": Default("for TPUs alone"),
    "use_cpu": switch("--device cpu"),
    "debug": only_off("a lost or late rank ends the run with exit code 76"),
    "enable_cpu_affinity": only_off("set it in the launch: numactl, or Slurm's --cpu-bind"),
    "gradient_accumulation_steps": Fact("accumulation"),
    "dynamo_config.dynamo_backend": Cases(
        {"inductor": Flags("--torch-compile"), "no": OFF, "false": OFF}, NoCounterpart("the compiler is inductor")
    ),
    "deepspeed_config.zero_stage": ZERO_STAGE,
    "deepspeed_config.offload_optimizer_device": Cases(
        {"none": OFF, "cpu": Flags("--optimizer-cpu-offload")}, NoCounterpart("offloading to disk is not supported")
    ),
    "deepspeed_config.offload_param_device": Cases(
        {"none": OFF, "cpu": Flags("--torch-fsdp2-cpu-offload")}, NoCounterpart("offloading to disk is not supported")
    ),
    "deepspeed_config.gradient_accumulation_steps": Fact("accumulation"),
    "deepspeed_config.gradient_clipping": Flags("--clip-grad {}"),
    "deepspeed_config.zero3_init_flag": Default("no rank ever holds more than its own slices"),
    "deepspeed_config.zero3_save_16bit_model": Default("`megatron-ext convert to-hf` writes the whole model"),
    "deepspeed_config.deepspeed_multinode_launcher": Default("torchrun starts the ranks"),
    "deepspeed_config.deepspeed_config_file": NoCounterpart("import that file too: --from deepspeed"),
    "megatron_lm_config.megatron_lm_tp_degree": Fact("tensor"),
    "megatron_lm_config.megatron_lm_pp_degree": Fact("pipeline"),
    "megatron_lm_config.megatron_lm_num_micro_batches": Fact("accumulation"),
    "megatron_lm_config.megatron_lm_gradient_clipping": Flags("--clip-grad {}"),
    "megatron_lm_config.megatron_lm_recompute_activations": switch("--recompute-activations"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": switch("--sequence-parallel"),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": switch("--use-distributed-optimizer"),
    "parallelism_config.parallelism_config_dp_replicate_size": Fact("replicate"),
    "parallelism_config.parallelism_config_dp_shard_size": Fact("shard"),
    "parallelism_config.parallelism_config_tp_size": Fact("tensor"),
    "parallelism_config.parallelism_config_cp_size": Fact("context"),
    # Not Accelerate's own, but often written into the same file.
    "batch_size": _BATCH,
    "learning_rate": Flags("--lr {}", float),
    "resume_from_checkpoint": Flags("--load {}"),
    "save_strategy": Default("--save-interval counts steps"),
    "save_steps": Flags("--save-interval {}"),
    "sync_bn": _BATCH_NORM,
    "sync_bn_group_size": _BATCH_NORM,
    **FSDP,
}

IMPLIED: dict[str, str] = {}
SHADOWED: dict[str, str] = {}
DEFAULT_ACCUMULATION = 1
