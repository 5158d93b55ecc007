"""Refused options about the model's structure, its first weights and its vocabulary. The notation is that of the
package."""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "multi-token prediction is not in this version; leave it out",
        """
        --mtp-standalone, --mtp-num-layers N, --mtp-loss-scaling-factor N =0.1, --mtp-use-repeated-layer,
        --mtp-detach-heads, --mtp-hybrid-override-pattern N
        """,
    ),
    (
        "multi-head latent attention is not in this version; use --group-query-attention",
        """
        --multi-latent-attention, --q-lora-rank N, --kv-lora-rank N =32, --qk-head-dim N =128,
        --qk-pos-emb-head-dim N =64, --v-head-dim N =128, --rotary-scaling-factor N =1.0, --mscale N =1.0,
        --mscale-all-dim N =0.0, --cache-mla-latents, --mla-down-proj-fusion
        """,
    ),
    (
        "sparse, linear and other experimental attention is not in this version; leave it out",
        """
        --experimental-attention-variant N, --dsa-indexer-n-heads N, --dsa-indexer-head-dim N, --dsa-indexer-topk N,
        --dsa-indexer-topk-freq N =1, --dsa-indexer-skip-topk-offset N =0, --dsa-indexer-loss-coeff N,
        --dsa-indexer-use-sparse-loss, --dsa-kernel-backend N =none, --dsa-indexer-rope-interleaved,
        --no-dsa-indexer-rotate-activation, --disable-dsa-indexer-rotate-activation, --no-dsa-indexer-scoring-relu,
        --disable-dsa-indexer-scoring-relu, --dsa-indexer-k-norm-epsilon N, --dsa-indexer-k-norm-fp32,
        --linear-conv-kernel-dim N =4, --linear-key-head-dim N =128, --linear-value-head-dim N =128,
        --linear-num-key-heads N =16, --linear-num-value-heads N =32, --linear-attention-freq N,
        --attention-output-gate, --softmax-type N =vanilla, --qk-l2-norm, --qk-clip, --qk-clip-alpha N =0.5,
        --qk-clip-threshold N =100, --use-kitchen-attention, --kitchen-attention-backend N =sdpa,
        --kitchen-config-file N, --kitchen-recipe-number N
        """,
    ),
    (
        "state-space and hybrid models are not in this version; use a GPT",
        """
        --mamba-state-dim N =128, --mamba-head-dim N =64, --mamba-num-groups N =8, --mamba-num-heads N,
        --mamba-training-ssm-states-dtype N, --mamba-inference-conv-states-dtype N =bf16,
        --mamba-inference-ssm-states-dtype N =bf16, --is-hybrid-model, --hybrid-layer-pattern N,
        --hybrid-override-pattern N, --disable-mamba-mem-eff-path
        """,
    ),
    (
        "other rotary variants are not in this version; leave it out, or use --position-embedding-type rope "
        "--use-rope-scaling",
        """
        --rotary-seq-len-interpolation-factor N =1, --rope-type N =rope,
        --yarn-original-max-position-embeddings N, --yarn-beta-fast N, --yarn-beta-slow N,
        --yarn-correction-range-round-to-int, --no-yarn-correction-range-round-to-int, --no-rope-freq N,
        --mrope-section N...
        """,
    ),
    (
        "relative position biases are not in this version; use --position-embedding-type",
        """
        --relative-attention-num-buckets N =32, --relative-attention-max-distance N =128
        """,
    ),
    (
        "the model's structure has no such variant in this version; leave it out",
        """
        --fp32-residual-connection, --apply-residual-connection-post-layernorm, --glu-linear-offset N =0.0,
        --activation-func-clamp-value N, --quick-geglu, --onnx-safe N, --bert-no-binary-head,
        --heterogeneous-layers-config-path N, --heterogeneous-layers-config-encoded-json N
        """,
    ),
    (
        "weights begin as a function of the seed and the parameter's name; use --init-method-std, "
        "--embedding-init-method-std or --init-method-xavier-uniform",
        """
        --data-parallel-random-init,
        --use-mup, --mup-width-mult N =1.0, --mup-base-hidden-size N, --mup-embedding-mult N =1.0,
        --mup-output-mult N =1.0, --mup-base-head-dim N, --mup-attn-scale-power N =1.0
        """,
    ),
    (
        "the vocabulary is always padded to --make-vocab-size-divisible-by times the tensor-parallel size; "
        "leave it out",
        """
        --no-pad-vocab-size, --disable-pad-vocab-size
        """,
    ),
)
