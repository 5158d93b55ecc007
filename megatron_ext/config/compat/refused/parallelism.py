"""Refused options about how the model is divided over ranks, and what the ranks send. The notation is that of the
package."""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "context parallelism has one group of ranks and one split; use --context-parallel-size and --cp-comm-type",
        """
        --max-seqlen-per-dp-cp-rank N, --hybrid-context-parallel
        """,
    ),
    (
        "of a mixture of experts, this part is not in this version; leave it out, docs/parallelism.md has the others",
        """
        --expert-tensor-parallel-num-weight-shards N, --moe-shared-expert-gate,
        --moe-shared-expert-glu-interleave-size N, --moe-enable-routing-replay, --moe-router-num-groups N =1,
        --moe-router-group-topk N =1, --moe-router-topk-scaling-factor N =1.0, --moe-router-enable-expert-bias,
        --moe-router-bias-update-rate N =0.001, --moe-router-quantile-balancing-ema N =0.0,
        --moe-router-force-load-balancing, --moe-router-force-biased N, --moe-single-grouped-weight,
        --moe-single-grouped-bias, --moe-input-jitter-eps N, --moe-expert-capacity-factor N,
        --moe-pad-expert-input-to-capacity, --moe-pad-experts-for-cuda-graph-inference,
        --moe-token-drop-policy N =probs, --moe-apply-probs-on-input, --moe-latent-size N,
        --moe-mlp-glu-interleave-size N, --moe-expert-rank-capacity-factor N, --moe-layer-freq N =1,
        --moe-use-upcycling, --moe-upcycling-granularity N =1, --moe-routing-trace-path N,
        --moe-routing-trace-max-training-iters N, --moe-routing-trace-capture-logits,
        --moe-routing-trace-capture-hidden-states, --moe-routing-trace-dump-weights,
        --save-tokens-per-expert-interval N
        """,
    ),
    (
        "only the plain form of FSDP is supported; use --use-megatron-fsdp or --use-torch-fsdp2 alone",
        """
        --megatron-fsdp-main-params-dtype N =fp32, --megatron-fsdp-main-grads-dtype N =auto;fp32,
        --megatron-fsdp-grad-comm-dtype N =auto;fp32, --enable-full-sharding-in-hsdp
        """,
    ),
    (
        "each weight has one shard per tensor-parallel rank; use --tensor-model-parallel-size",
        """
        --tensor-parallel-num-weight-shards N
        """,
    ),
    (
        "gradients are summed in one precision; use --accumulate-allreduce-grads-in-fp32 or --ddp-bucket-size",
        """
        --ddp-reduce-scatter-with-fp32-accumulation, --ddp-param-name-patterns-for-fp32-local-accumulation N...
        """,
    ),
    (
        "every rank really computes; use --dry-run to check a layout without them",
        """
        --fake-process-group
        """,
    ),
)
