"""The flags by which a command line is known to be of Megatron-DeepSpeed's, MindSpeed's, or the like."""

from megatron_ext.config.parse.command_line import Translator

_OF_DEEPSPEED = (
    *("--deepspeed", "--deepspeed-config", "--zero-stage", "--local-rank", "--no-pipeline-parallel"),
    *("--deepspeed-activation-checkpointing", "--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens"),
    *("--topk", "--expert-interval", "--mlp-type", "--moe-expert-parallel-size", "--moe-loss-coeff"),
    *("--disable-moe-token-dropping", "--create-moe-param-group", "--moe-train-capacity-factor"),
    *("--moe-eval-capacity-factor", "--moe-min-capacity", "--use-tutel", "--enable-expert-tensor-parallelism"),
    *("--disable-moe-top2-2nd-expert-sampling", "--cpu-optimizer", "--cpu-torch-adam", "--no-tie-embed-logits"),
    *("--use-rms-norm", "--glu-activation", "--activation-func-type", "--attention-head-type", "--pp-partition-method"),
    *("--rank", "--dist-url"),
    *(f"--{part}-weighted-split-paths{end}" for part in ("train", "valid", "test") for end in ("", "-path")),
)
_OF_MINDSPEED = (
    *("--ai-framework", "--spec", "--enable-hf2mg-convert", "--model-type-hf", "--num-layer-list", "--noop-layers"),
    *("--rope-scaling-type", "--n-shared-experts", "--first-k-dense-replace", "--fix-router", "--norm-topk-prob"),
    *("--seq-aux", "--moe-tp-extend-ep", "--moe-router-load-balancing-type", "--use-glm-rope", "--use-z-loss"),
)
_OF_OTHERS = ("--hybrid-attention-ratio", "--hybrid-mlp-ratio", "--tokenizer-type", "--tokenizer-file")

TRANSLATORS = (
    Translator(
        frozenset((*_OF_DEEPSPEED, *_OF_MINDSPEED, *_OF_OTHERS)), "megatron_ext.plugins.migrate.megatron_deepspeed:read"
    ),
)
