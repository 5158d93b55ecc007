"""Says what to do with flags of other programs, which scripts of Megatron-DeepSpeed, Accelerate and ModelOpt put next
to Megatron's: the equivalent, and the tool that translates their configuration files."""

_IMPORT = "python tools/import_config.py --from {} FILE prints the flags of ours that its configuration file means"
_DEEPSPEED, _ACCELERATE = _IMPORT.format("deepspeed"), _IMPORT.format("accelerate")
_SHARDING = (
    "use --use-distributed-optimizer (stage 1), or --use-megatron-fsdp with --data-parallel-sharding-strategy "
    "optim_grads (stage 2) or optim_grads_params (stage 3)"
)
_BLOOMS = "it is BLOOM's Megatron-DeepSpeed's"
_LISTS = "use --train-data-path, --valid-data-path and --test-data-path, or --per-split-data-args-path"
_STAGES = "use --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split, or leave it out"
_SAMPLES = "which is the tokens divided by --seq-length"
_PAI = "it is Pai-Megatron-Patch's"
_EPFL = "it is epfLLM's Megatron-LLM's"

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
    "--train-tokens": f"it is Megatron-DeepSpeed's: use --train-samples, {_SAMPLES}",
    "--lr-decay-tokens": f"it is Megatron-DeepSpeed's: use --lr-decay-samples, {_SAMPLES}",
    "--lr-warmup-tokens": f"it is Megatron-DeepSpeed's: use --lr-warmup-samples, {_SAMPLES}",
    "--universal-checkpoint": "it is Megatron-DeepSpeed's: leave it out; --load reads any layout's checkpoint",
    "--num-key-value-heads": "it is Megatron-DeepSpeed's: use --group-query-attention with --num-query-groups",
    "--train-weighted-split-paths-path": f"{_BLOOMS}: {_LISTS}",
    "--valid-weighted-split-paths-path": f"{_BLOOMS}: {_LISTS}",
    "--test-weighted-split-paths-path": f"{_BLOOMS}: {_LISTS}",
    "--train-weighted-split-paths": f"{_BLOOMS}: use --train-data-path",
    "--valid-weighted-split-paths": f"{_BLOOMS}: use --valid-data-path",
    "--test-weighted-split-paths": f"{_BLOOMS}: use --test-data-path",
    "--pad-vocab-size-to": f"{_BLOOMS}: use --padded-vocab-size",
    "--kill-switch-path": f"{_BLOOMS}: leave it out; a file named stop in --save saves and ends the run",
    "--embed-layernorm": f"{_BLOOMS}: a norm after the embedding is not in this version; leave it out",
    "--pp-partition-method": f"{_BLOOMS}: {_STAGES}",
    "--patch-tokenizer-type": f"{_PAI}: use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model",
    "--extra-vocab-size": f"{_PAI}: leave it out; --make-vocab-size-divisible-by pads the vocabulary",
    "--dataset": f"{_PAI}: leave it out; --data-path reads .bin and .idx files",
    "--max-padding-length": f"{_PAI}: leave it out; samples of pretraining are packed to --seq-length",
    "--use-rms-norm": f"{_EPFL}: use --normalization RMSNorm",
    "--glu-activation": f"{_EPFL}: use --swiglu",
    "--no-tie-embed-logits": f"{_EPFL}: use --untie-embeddings-and-output-weights",
    "--num-attention-heads-kv": f"{_EPFL}: use --group-query-attention with --num-query-groups",
    "--activation-func-type": "it is Megatron-DeepSpeed's on Gaudi: use --swiglu",
    "--layernorm-type": "it is Megatron-DeepSpeed's on Gaudi: use --normalization",
    "--rope-theta": "it is the name in a Hugging Face config.json: use --rotary-base",
    "--norm-topk-prob": (
        "it is MindSpeed's: leave it out; without --moe-router-pre-softmax the weights of a token's experts add up to 1"
    ),
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
