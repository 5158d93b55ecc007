"""Says what to do with flags of other programs, which scripts of Accelerate, ModelOpt and forks put next to Megatron's:
the equivalent, and the tool that translates their configuration files. `foreign/` takes Megatron-DeepSpeed's."""

from megatron_ext.config.parse.other_flags import OtherFlags

_ACCELERATE = "megatron-ext import-config --from accelerate FILE prints the flags that its file means"
_BLOOMS = "it is BLOOM's Megatron-DeepSpeed's"
_PAI = "it is Pai-Megatron-Patch's"
_MINDSPEED = "it is MindSpeed's"
_BIGCODES = "it is BigCode's Megatron-LM's"
_MEGABLOCKS = "it is MegaBlocks'"
_MPI = "it names a rank by hand: start with torchrun, or with mpirun and $MASTER_ADDR, and leave it out"
_YARN = f"{_MINDSPEED}: use --rope-type yarn, --mscale and --mscale-all-dim, or --use-rope-scaling"

FLAGS: dict[str, str] = {
    "--gradient-accumulation-steps": (
        "it is DeepSpeed's: use --global-batch-size, which is --micro-batch-size times these steps times the "
        "data-parallel size"
    ),
    "--moe-num-experts": f"{_MEGABLOCKS}: use --num-experts",
    "--moe-top-k": f"{_MEGABLOCKS}: use --moe-router-topk with --moe-router-pre-softmax",
    "--moe-loss-weight": f"{_MEGABLOCKS}: use --moe-aux-loss-coeff",
    "--moe-expert-model-parallelism": f"{_MEGABLOCKS}: use --expert-model-parallel-size",
    "--reset-progress": f"{_BLOOMS}: use --finetune",
    "--eval-only": f"{_BLOOMS}: use --skip-train, or megatron-ext tasks",
    "--patch-tokenizer-type": f"{_PAI}: use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model",
    "--layernorm-type": "it is Megatron-DeepSpeed's on Gaudi: use --normalization",
    "--n-shared-experts": (
        f"{_MINDSPEED}: use --moe-shared-expert-intermediate-size, which is this number times --moe-ffn-hidden-size"
    ),
    "--seq-aux": f"{_MINDSPEED}: use --moe-router-load-balancing-type seq_aux_loss",
    "--fix-sub-seq-length": (
        f"{_MINDSPEED}, for measuring speed: attention ends where documents of the data do (--reset-attention-mask); "
        "leave it out"
    ),
    **dict.fromkeys(
        ("--hybrid-attention-ratio", "--hybrid-mlp-ratio"),
        "it is older Megatron-LM's: use --hybrid-layer-pattern, with a letter for each layer",
    ),
    "--noop-layers": f"{_MINDSPEED}: give numbers of layers from 0, below --num-layers, as in 62,63",
    "--model-type-hf": f"{_MINDSPEED}: leave it out; --load-hf DIR reads what the model is from its config.json",
    **dict.fromkeys(
        ("--rope-scaling-type", "--rope-scaling-mscale", "--rope-scaling-mscale-all-dim"),
        _YARN,
    ),
    **dict.fromkeys(("--rank", "--dist-url"), _MPI),
    **dict.fromkeys(
        (
            *("--kd", "--mos", "--load-teacher", *(f"--kd-{name}" for name in ("alpha-ce", "beta-ce", "temp"))),
            *(f"--{name}-teacher" for name in ("num-layers", "num-experts", "hidden-size", "num-attention-heads")),
        ),
        "it is Megatron-DeepSpeed's distillation, which is not in this version: leave it out",
    ),
    **dict.fromkeys(
        [f"--ds-sequence-parallel-fpdt{name}" for name in ("", "-chunk-size", "-offloading")],
        "it is Megatron-DeepSpeed's attention in chunks of a sequence, which is not in this version: leave it out, and "
        "for memory add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "--tokenizer-file": (
        f"{_BIGCODES}: use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model, the folder of tokenizer.json"
    ),
    **dict.fromkeys(
        ("--hostfile", "--num-gpus", "--num-nodes", "--include", "--exclude"),
        "it is the deepspeed launcher's: start torchrun --nproc-per-node GPUS --nnodes MACHINES --node-rank RANK "
        "--master-addr ADDRESS pretrain_gpt.py with the other flags on each machine, or use Slurm",
    ),
    "--config-file": f"it is Accelerate's: start with torchrun and leave it out; {_ACCELERATE}",
    "--num-processes": "it is Accelerate's: use torchrun --nproc-per-node",
    "--num-machines": "it is Accelerate's: use torchrun --nnodes",
    **dict.fromkeys(
        ("--export-kd-cfg", "--export-kd-teacher-load", "--export-te-mcore-model", "--export-quant-cfg"),
        "it is ModelOpt's: distillation and quantization are not in this version; leave it out to train on the data "
        "alone, or use Megatron-LM's examples/post_training/modelopt",
    ),
    "--export-force-local-attention": "it is ModelOpt's: leave it out",
    "--enable-gpt-oss": (
        "it is ModelOpt's: use --position-embedding-type yarn --rotary-scaling-factor 32 "
        "--original-max-position-embeddings 131072 --no-yarn-correction-range-round-to-int"
    ),
}
"""Flag, with hyphens -> what to do instead."""


READ_AS_THERE: dict[str, str] = {
    "--deepspeed": "Megatron-DeepSpeed's engine; megatron-core is always the engine here.",
    "--deepspeed_config FILE": "DeepSpeed's file, or its text in base64; it gives clipping, ZeRO, batches, precision.",
    "--zero-stage N": "0: plain data parallelism; 1: --use-distributed-optimizer; 2: --use-torch-fsdp2 "
    "--torch-fsdp2-no-reshard-after-forward; 3: --use-torch-fsdp2. DeepSpeed's file wins where it has a stage.",
    "--no-pipeline-parallel": "One pipeline stage.",
    "--train-tokens N": "The length in tokens, in place of --train-samples.",
    "--lr-decay-tokens N": "The same of --lr-decay-samples.",
    "--lr-warmup-tokens N": "The same of --lr-warmup-samples.",
    "--topk N": "--moe-router-topk.",
    "--expert-interval N": "--moe-layer-freq: experts in every N-th layer.",
    "--mlp-type TEXT": "standard: layers of experts have no MLP besides.",
    "--moe-expert-parallel-size N": "--expert-model-parallel-size.",
    "--moe-loss-coeff X": "--moe-aux-loss-coeff.",
    "--use-glm-rope": "MindSpeed's: --rotary-interleaved.",
    "--use-z-loss": "LLM-jp's: --z-loss-strength 1e-4.",
    "--fix-router": "MindSpeed's, for measuring speed: --moe-router-force-load-balancing, which draws the experts.",
    "--enable-hf2mg-convert": "MindSpeed's: --load names a Hugging Face model, as --load-hf does.",
    "--norm-topk-prob": "MindSpeed's: weights of a token's experts add up to 1, as without --moe-router-pre-softmax.",
    "--moe-tp-extend-ep": "MindSpeed's: --expert-tensor-parallel-size 1, and experts divided over those ranks, too.",
    "--noop-layers N,N": "MindSpeed's: layers that do nothing; --num-layers and the stages are without them.",
    "--num-layer-list N,N": "MindSpeed's: layers of each stage, as --pipeline-model-parallel-layout.",
}
"""Flag of Megatron-DeepSpeed's and MindSpeed's scripts, with its value -> what `foreign/` takes it for."""


OTHER_FLAGS = (OtherFlags(FLAGS, READ_AS_THERE),)
