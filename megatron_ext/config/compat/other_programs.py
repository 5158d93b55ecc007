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
_MINDSPEED = "it is MindSpeed's"
_BIGCODES = "it is BigCode's Megatron-LM's"
_MEGABLOCKS = "it is MegaBlocks'"
_MPI = "it names a rank by hand: start with torchrun, or with mpirun and $MASTER_ADDR, and leave it out"
_YARN = f"{_MINDSPEED}: use --rope-type yarn, --mscale and --mscale-all-dim, or --use-rope-scaling"
_LEARNED_ROUTING = "experts are chosen by what the router has learned; leave it out"

FLAGS: dict[str, str] = {
    "--deepspeed": f"it is DeepSpeed's: start with torchrun and leave it out; {_DEEPSPEED}",
    "--deepspeed-config": f"it is DeepSpeed's: leave it out; {_DEEPSPEED}",
    "--deepspeed-mpi": "it is DeepSpeed's: start with torchrun, or as examples/slurm does, and leave it out",
    "--deepspeed-activation-checkpointing": (
        "it is DeepSpeed's: use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "--zero-stage": f"it is Megatron-DeepSpeed's: {_SHARDING}; {_DEEPSPEED}",
    "--zero-reduce-scatter": f"it is Megatron-DeepSpeed's: {_SHARDING}",
    **dict.fromkeys(
        (
            "--zero-contiguous-gradients",
            "--zero-contigious-gradients",
            "--zero-allgather-bucket-size",
            "--zero-reduce-bucket-size",
        ),
        f"it is Megatron-DeepSpeed's: {_SHARDING}",
    ),
    "--moe-expert-parallel-size": (
        "it is Megatron-DeepSpeed's: use --expert-model-parallel-size; its --num-experts 1 is a model without experts, "
        "for which leave both out"
    ),
    "--moe-loss-coeff": "it is Megatron-DeepSpeed's: use --moe-aux-loss-coeff",
    "--create-moe-param-group": "it is Megatron-DeepSpeed's: leave it out",
    "--mlp-type": "it is Megatron-DeepSpeed's: leave standard out; residual experts are not in this version",
    "--gradient-accumulation-steps": (
        "it is DeepSpeed's: use --global-batch-size, which is --micro-batch-size times these steps times the "
        "data-parallel size"
    ),
    "--moe-num-experts": f"{_MEGABLOCKS}: use --num-experts",
    "--moe-top-k": f"{_MEGABLOCKS}: use --moe-router-topk with --moe-router-pre-softmax",
    "--moe-loss-weight": f"{_MEGABLOCKS}: use --moe-aux-loss-coeff",
    "--moe-expert-model-parallelism": f"{_MEGABLOCKS}: use --expert-model-parallel-size",
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
    "--reset-progress": f"{_BLOOMS}: use --finetune",
    "--eval-only": f"{_BLOOMS}: use --skip-train, or tasks/main.py",
    "--pp-partition-method": f"{_BLOOMS}: {_STAGES}",
    "--patch-tokenizer-type": f"{_PAI}: use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model",
    "--intermediate-size": f"{_PAI}: use --ffn-hidden-size",
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
    "--n-shared-experts": (
        f"{_MINDSPEED}: use --moe-shared-expert-intermediate-size, which is this number times --moe-ffn-hidden-size"
    ),
    "--seq-aux": f"{_MINDSPEED}: use --moe-router-load-balancing-type seq_aux_loss",
    "--fix-router": f"{_MINDSPEED}, for measuring speed: {_LEARNED_ROUTING}",
    "--noop-layers": (
        f"{_MINDSPEED}: use --num-layers without these, and --pipeline-model-parallel-layout, or "
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
    ),
    "--num-layer-list": f"{_MINDSPEED}: use --pipeline-model-parallel-layout",
    "--enable-hf2mg-convert": f"{_MINDSPEED}: use --load-hf DIR to begin from a Hugging Face model",
    "--model-type-hf": f"{_MINDSPEED}: leave it out; --load-hf DIR reads what the model is from its config.json",
    **dict.fromkeys(
        ("--rope-scaling-type", "--rope-scaling-mscale", "--rope-scaling-mscale-all-dim"),
        _YARN,
    ),
    "--use-z-loss": "it is LLM-jp's: a loss on the size of the logits is not in this version; leave it out",
    **dict.fromkeys(("--rank", "--dist-url"), _MPI),
    "--attention-head-type": (
        f"{_BIGCODES}: for multiquery use --group-query-attention with --num-query-groups 1; leave multihead out"
    ),
    "--tokenizer-file": (
        f"{_BIGCODES}: use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model, the folder of tokenizer.json"
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
