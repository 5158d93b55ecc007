"""Says what to do with flags of other programs, which scripts of Megatron-DeepSpeed, Accelerate and ModelOpt put next
to Megatron's: the equivalent, and the tool that translates their configuration files."""

_IMPORT = "python tools/import_config.py --from {} FILE prints the flags of ours that its configuration file means"
_DEEPSPEED, _ACCELERATE = _IMPORT.format("deepspeed"), _IMPORT.format("accelerate")
_SHARDING = (
    "use --use-distributed-optimizer (stage 1), or --use-megatron-fsdp with --data-parallel-sharding-strategy "
    "optim_grads (stage 2) or optim_grads_params (stage 3)"
)

FLAGS: dict[str, str] = {
    "--deepspeed": f"it is DeepSpeed's: start with torchrun and leave it out; {_DEEPSPEED}",
    "--deepspeed-config": f"it is DeepSpeed's: leave it out; {_DEEPSPEED}",
    "--deepspeed-mpi": "it is DeepSpeed's: start with torchrun, or as examples/slurm does, and leave it out",
    "--deepspeed-activation-checkpointing": (
        "it is DeepSpeed's: use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "--zero-stage": f"it is Megatron-DeepSpeed's: {_SHARDING}; {_DEEPSPEED}",
    "--zero-reduce-scatter": f"it is Megatron-DeepSpeed's: {_SHARDING}",
    "--zero-contiguous-gradients": f"it is Megatron-DeepSpeed's: {_SHARDING}",
    "--cpu-optimizer": "it is Megatron-DeepSpeed's: use --optimizer-cpu-offload",
    "--cpu-torch-adam": "it is Megatron-DeepSpeed's: use --optimizer-cpu-offload",
    "--no-pipeline-parallel": (
        "it is Megatron-DeepSpeed's: leave it out; without --pipeline-model-parallel-size there are no stages"
    ),
    "--tokenizer-name-or-path": "it is Megatron-DeepSpeed's: use --tokenizer-model with HuggingFaceTokenizer",
    "--ds-sequence-parallel-size": (
        "it is Megatron-DeepSpeed's: use --context-parallel-size with --cp-comm-type a2a, which exchanges heads"
    ),
    "--hostfile": (
        "it is DeepSpeed's launcher's: give torchrun --nnodes, --node-rank and --rdzv-endpoint on each machine, or use "
        "Slurm, and leave it out; python tools/import_config.py translates the configuration file that goes with it"
    ),
    "--num-gpus": "it is DeepSpeed's launcher's: use torchrun --nproc-per-node",
    "--num-nodes": "it is DeepSpeed's launcher's: use torchrun --nnodes",
    "--include": "it is DeepSpeed's launcher's: choose devices with CUDA_VISIBLE_DEVICES",
    "--config-file": f"it is Accelerate's: start with torchrun and leave it out; {_ACCELERATE}",
    "--num-processes": "it is Accelerate's: use torchrun --nproc-per-node",
    "--num-machines": "it is Accelerate's: use torchrun --nnodes",
    **dict.fromkeys(
        ("--export-kd-cfg", "--export-kd-teacher-load", "--export-te-mcore-model", "--export-quant-cfg"),
        "it is ModelOpt's: distillation and quantization are not in this version; leave it out",
    ),
}
"""Flag, with hyphens -> what to do instead."""


def advice(flag: str) -> str | None:
    """Return what to do instead of a flag of another program; None for a flag that is not one."""
    return FLAGS.get(flag.replace("_", "-"))
