"""Refused options about how the model is divided over ranks, and what the ranks send. The notation is that of the
package."""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "context parallelism has one group of ranks and one split; use --context-parallel-size and --cp-comm-type",
        """
        --hierarchical-context-parallel-sizes N...,
        --max-seqlen-per-dp-cp-rank N, --hybrid-context-parallel
        """,
    ),
    (
        "of a mixture of experts, this part is not in this version; docs/parallelism.md has those that are",
        """
        --expert-tensor-parallel-num-weight-shards N, --overlap-moe-expert-parallel-comm,
        --overlap-dispatch-backward-with-experts-wgrad, --ep-overlap-early-attn-memory-release,
        --moe-shared-expert-gate, --moe-shared-expert-overlap, --moe-shared-expert-glu-interleave-size N,
        --moe-enable-routing-replay, --moe-router-padding-for-quantization, --moe-router-padding-for-fp8,
        --moe-router-num-groups N, --moe-router-group-topk N, --moe-router-topk-scaling-factor N,
        --moe-router-enable-expert-bias, --moe-router-bias-update-rate N =0.001,
        --moe-router-quantile-balancing-ema N =0.0, --moe-router-force-load-balancing,
        --moe-router-force-biased N, --moe-single-grouped-weight, --moe-single-grouped-bias,
        --moe-input-jitter-eps N, --moe-enable-deepep, --moe-flex-dispatcher-backend N =deepep,
        --moe-permute-fusion-into-hybridep, --moe-hybridep-pad-uneven-dispatch-inputs, --moe-per-layer-logging,
        --moe-expert-capacity-factor N, --moe-pad-expert-input-to-capacity,
        --moe-pad-experts-for-cuda-graph-inference, --moe-token-drop-policy N =probs, --moe-layer-recompute,
        --moe-permute-fusion, --moe-router-fusion, --moe-apply-probs-on-input, --moe-latent-size N,
        --moe-flex-dispatcher-num-sms N, --moe-deepep-num-sms N, --moe-hybridep-num-sms N,
        --moe-hybridep-num-blocks-permute N, --moe-hybridep-num-blocks-unpermute N,
        --moe-hybridep-num-sms-preprocessing N =108, --moe-ncclep-static-shape, --moe-ncclep-zero-copy,
        --moe-mlp-glu-interleave-size N, --moe-expert-rank-capacity-factor N, --moe-paged-stash,
        --moe-paged-stash-page-size N =64, --moe-paged-stash-buffer-size-factor-cuda N =1.1,
        --moe-paged-stash-buffer-size-factor-cpu N =0.0, --moe-layer-freq N =1, --moe-use-upcycling,
        --moe-upcycling-granularity N =1, --moe-routing-trace-path N, --moe-routing-trace-max-training-iters N,
        --moe-routing-trace-capture-logits, --moe-routing-trace-capture-hidden-states,
        --moe-routing-trace-dump-weights, --use-grouped-gemm-for-shared-expert,
        --use-grouped-gemm-for-dense-mlp, --high-priority-a2a-comm-stream, --save-tokens-per-expert-interval N
        """,
    ),
    (
        "the pipeline runs megatron-core's own schedule; leave it out",
        """
        --overlap-p2p-communication-warmup-flush,
        --use-ring-exchange-p2p, --defer-embedding-wgrad-compute, --wgrad-deferral-limit N =0, --delay-wgrad-compute,
        --pipeline-model-parallel-comm-backend N
        """,
    ),
    (
        "only the plain form of FSDP is supported; use --use-megatron-fsdp or --use-torch-fsdp2 alone",
        """
        --fsdp-manual-registration, --fsdp-double-buffer,
        --fsdp-db-use-persist-buf-on-alloc-fail,
        --megatron-fsdp-main-params-dtype N =fp32, --megatron-fsdp-main-grads-dtype N =auto,
        --megatron-fsdp-grad-comm-dtype N =auto, --megatron-fsdp-enable-fine-grained-param-gather,
        --megatron-fsdp-max-pool-double-buffer, --suggested-communication-unit-size N, --keep-fp8-transpose-cache,
        --enable-full-sharding-in-hsdp
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
        --ddp-num-buckets N, --ddp-reduce-scatter-with-fp32-accumulation,
        --ddp-param-name-patterns-for-fp32-local-accumulation N..., --ddp-average-in-collective, --grad-reduce-in-bf16
        """,
    ),
    (
        "overlap inside the linear layers needs Transformer Engine; use --sequence-parallel alone",
        """
        --tp-comm-overlap, --tp-comm-overlap-rs-dgrad, --tp-comm-bootstrap-backend N =nccl, --tp-comm-overlap-cfg N
        """,
    ),
    (
        "ranks follow Megatron's usual order (tensor, data, pipeline)",
        """
        --use-tp-pp-dp-mapping
        """,
    ),
    (
        "network tuning beyond torch.distributed's own is not in this version; use NCCL's environment variables",
        """
        --use-nccl-ub, --use-sharp, --sharp-enabled-group N, --nccl-communicator-config-path N, --symmetric-ar-type N,
        --nccl-all-reduce-for-prefill
        """,
    ),
    (
        "every rank really computes; use --dry-run to check a layout without them",
        """
        --fake-process-group
        """,
    ),
    (
        "the parameter gathering overlaps with the next forward pass; use --overlap-param-gather",
        """
        --overlap-param-gather-with-optimizer-step
        """,
    ),
)
