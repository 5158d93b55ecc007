"""Lists the flags that `--help` shows without a word: the flags that published launch scripts use most, and the flags
that a first try on a laptop needs."""

_COUNTED = """
    num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups seq-length
    max-position-embeddings position-embedding-type rotary-base swiglu normalization
    untie-embeddings-and-output-weights disable-bias-linear num-experts moe-router-topk moe-router-load-balancing-type
    moe-aux-loss-coeff moe-grouped-gemm init-method-std attention-dropout hidden-dropout transformer-impl
    tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size context-parallel-size
    expert-model-parallel-size moe-token-dispatcher-type use-distributed-optimizer overlap-grad-reduce
    overlap-param-gather distributed-backend distributed-timeout-minutes
    micro-batch-size global-batch-size train-iters eval-interval eval-iters bf16 fp16 attention-backend
    deterministic-mode no-gradient-accumulation-fusion
    optimizer lr min-lr lr-decay-style lr-decay-iters lr-warmup-iters lr-warmup-fraction weight-decay clip-grad
    adam-beta1 adam-beta2 adam-eps
    data-path split data-cache-path tokenizer-type tokenizer-model vocab-file merge-file num-workers
    save load save-interval async-save ckpt-format use-checkpoint-opt-param-scheduler
    log-interval tensorboard-dir log-throughput log-params-norm log-num-zeros-in-grad timing-log-level
"""
COUNTED = frozenset(_COUNTED.split())
"""Flags, without their hyphens, that stand in most launches: Megatron-LM's and other groups' recorded launch scripts
each count half (`tests/unit/config/parse/test_help_text.py` counts)."""

FIRST_TRY = frozenset(("device", "mock-data", "vocab-size", "world-size"))
"""Flags for trying a model without a GPU, without text or without ranks; Megatron-LM's scripts need none of them."""

USUAL = COUNTED | FIRST_TRY
