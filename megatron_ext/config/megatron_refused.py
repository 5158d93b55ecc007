"""Every option of Megatron's own command line that is refused, with what to use instead, by reason.

Flags are separated by commas: `--flag` is a switch, `--flag N` takes a value, `--flag N...` takes several. `=value` is
Megatron's default, or another value that asks for nothing: that one passes.
Read from Megatron-LM as the megatron-core 0.19.2 wheel holds it; tests/unit/test_megatron_options.py reads that
wheel and fails when an option is missing here, is listed twice, or takes another number of values.
"""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "it is an old spelling; use --micro-batch-size",
        """
        --batch-size N
        """,
    ),
    (
        "it is an old spelling; use --tensor-model-parallel-size",
        """
        --model-parallel-size N
        """,
    ),
    (
        "it is an old spelling; use --lr-warmup-fraction or --lr-warmup-iters",
        """
        --warmup N
        """,
    ),
    (
        "it is an old spelling; use --recompute-activations or --recompute-granularity",
        """
        --checkpoint-activations
        """,
    ),
    (
        "it is an old spelling; use --position-embedding-type rope",
        """
        --use-rotary-position-embeddings
        """,
    ),
    (
        "it is an old spelling; use --position-embedding-type none",
        """
        --no-position-embedding
        """,
    ),
    (
        "a GPT is a decoder only; use --num-layers and --seq-length",
        """
        --encoder-num-layers N, --decoder-num-layers N, --encoder-seq-length N, --decoder-seq-length N
        """,
    ),
    (
        "use --config run.yaml, whose names are the flags' own",
        """
        --yaml-cfg N
        """,
    ),
    (
        "layer specs are not loaded from a module that the command line names; choose with --transformer-impl",
        """
        --spec N..., --enable-experimental, --use-te-activation-func, --use-transformer-engine-op-fuser,
        --te-rng-tracker, --te-precision-config-file N, --config-logger-dir N
        """,
    ),
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
        "the copies of HSDP are whole; use --num-distributed-optimizer-instances alone, or fewer copies",
        """
        --outer-dp-sharding-strategy N =no_shard
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
        "sliding-window attention is not in this version; leave it out for full causal attention",
        """
        --window-size N, --window-attn-skip-freq N
        """,
    ),
    (
        "other rotary variants are not in this version; use --rotary-base, --rotary-percent or --use-rope-scaling",
        """
        --rotary-interleaved, --rotary-seq-len-interpolation-factor N, --rope-type N =rope,
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
        --fp32-residual-connection, --apply-residual-connection-post-layernorm, --apply-layernorm-1p,
        --glu-linear-offset N =0.0, --activation-func-clamp-value N, --apply-query-key-layer-scaling,
        --use-fused-weighted-squared-relu, --quick-geglu, --onnx-safe N, --bert-no-binary-head,
        --heterogeneous-layers-config-path N, --heterogeneous-layers-config-encoded-json N,
        --mlp-chunks-for-training N =1
        """,
    ),
    (
        "weights begin normal with --init-method-std, as a function of the seed and the parameter's name; leave it out",
        """
        --no-initialization, --embedding-init-method-std N, --init-method-xavier-uniform, --data-parallel-random-init,
        --use-mup, --mup-width-mult N =1.0, --mup-base-hidden-size N, --mup-embedding-mult N =1.0,
        --mup-output-mult N =1.0, --mup-base-head-dim N, --mup-attn-scale-power N =1.0
        """,
    ),
    (
        "the vocabulary is always padded to --make-vocab-size-divisible-by times the tensor-parallel size",
        """
        --no-pad-vocab-size, --disable-pad-vocab-size
        """,
    ),
    (
        "low-precision training is not in this version; use --bf16",
        """
        --fp8-format N, --fp8-recipe N =delayed, --fp8-quantizer-factory N, --fp8-margin N =0, --fp8-interval N =1,
        --fp8-amax-history-len N =1, --fp8-amax-compute-algo N =most_recent, --fp8-output-proj, --fp8-param-gather,
        --no-fp8-wgrad, --disable-fp8-wgrad, --fp4-format N, --fp4-recipe N =nvfp4, --fp4-quantizer-factory N,
        --fp4-param-gather, --first-last-layers-bf16, --num-layers-at-start-in-bf16 N =1,
        --num-layers-at-end-in-bf16 N =1, --reuse-grad-buf-for-mxfp8-param-ag
        """,
    ),
    (
        "the loss is computed in fp32; use --bf16 or --fp16 for the rest",
        """
        --fp16-lm-cross-entropy
        """,
    ),
    (
        "optimizer state is in fp32; use --use-distributed-optimizer or --optimizer-cpu-offload to save memory",
        """
        --use-precision-aware-optimizer, --main-grads-dtype N =fp32,
        --main-params-dtype N =fp32, --exp-avg-dtype N =fp32, --exp-avg-sq-dtype N =fp32
        """,
    ),
    (
        "use --optimizer adam or sgd",
        """
        --muon-momentum N =0.9, --muon-no-split-qkv, --muon-nesterov, --muon-scale-mode N =spectral,
        --muon-fp32-matmul-prec N =medium, --muon-coefficient-type N =quintic, --muon-num-ns-steps N =5,
        --muon-tp-mode N =blockwise, --muon-extra-scale-factor N =1.0, --muon-scalar-optimizer N =adam,
        --lion-beta1 N =0.95, --lion-beta2 N =0.98
        """,
    ),
    (
        "weight decay leaves out norms and biases, and there is one learning rate; leave it out",
        """
        --apply-wd-to-qk-layernorm, --no-weight-decay-cond-type N, --decoupled-lr N, --decoupled-min-lr N,
        --freeze-all-layers, --dump-param-to-param-group-map N
        """,
    ),
    (
        "what is kept for recomputation is kept whole on each rank; use --sequence-parallel, which divides it too",
        """
        --distribute-saved-activations
        """,
    ),
    (
        "activation offloading is not in this version; use --recompute-granularity to save memory",
        """
        --cpu-offloading-num-layers N =0, --cpu-offloading-retain-pinned-cpu-buffers,
        --fine-grained-activation-offloading, --fine-grained-offloading-max-inflight-offloads N,
        --offload-modules N..., --min-offloaded-tensor-size N =1048576, --delay-offload-until-cuda-graph,
        --delta-offload-bytes-across-pp-ranks N =0, --activation-offload-fraction N =1.0
        """,
    ),
    (
        "CUDA graphs are not in this version; leave it out",
        """
        --enable-cuda-graph, --cuda-graph-warmup-steps N =3, --external-cuda-graph, --cuda-graph-impl N =none,
        --inference-cuda-graph-scope N, --optimizer-cuda-graph, --rl-persist-cuda-graphs, --no-rl-persist-cuda-graphs,
        --rl-training-cuda-graphs, --no-rl-training-cuda-graphs, --cuda-graph-scope N..., --cuda-graph-modules N...,
        --inference-dynamic-batching-num-cuda-graphs N =16, --decode-only-cuda-graphs,
        --inference-cuda-graph-all-prefills, --inference-cuda-graph-max-tokens N =512,
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count N =16,
        --inference-dynamic-batching-cuda-graph-sizing-distribution N =exponential
        """,
    ),
    (
        "the batch grows only by --rampup-batch-size, and must be divisible by micro batch x data-parallel size",
        """
        --step-batch-size-schedule N, --decrease-batch-size-if-needed
        """,
    ),
    (
        "no step is skipped or altered; leave it out",
        """
        --iterations-to-skip N..., --phase-transition-iterations N
        """,
    ),
    (
        "checks and injected faults of that kind come with the resilience issue; a NaN always ends the run",
        """
        --gpu-sniff-test-interval N, --check-for-large-grads,
        --check-for-spiky-loss, --error-injection-rate N =0, --error-injection-type N =transient_error,
        --result-rejected-tracker-filename N, --fault-injector-ranks N, --fault-injector-num-ranks N,
        --fault-injector-fault-types N, --fault-injector-fault-probabilities N, --fault-injector-fault-delay N,
        --fault-injector-delay-start-iteration N, --fault-injector-mtti-seconds N, --fault-injector-offset-seconds N,
        --fault-injector-seed N, --log-straggler, --enable-ft-package, --calc-ft-timeouts, --inprocess-restart,
        --inprocess-max-iterations N, --inprocess-monitor-thread-interval N =1.0,
        --inprocess-monitor-process-interval N =1.0, --inprocess-progress-watchdog-interval N =1.0,
        --inprocess-heartbeat-interval N =30, --inprocess-soft-timeout N =60, --inprocess-hard-timeout N =90,
        --inprocess-heartbeat-timeout N =60, --inprocess-barrier-timeout N =120,
        --inprocess-completion-timeout N =120, --inprocess-last-call-wait N =1,
        --inprocess-termination-grace-time N =1, --inprocess-granularity N =node, --inprocess-active-world-size N =1,
        --inprocess-empty-cuda-cache, --adlr-autoresume, --exit-signal N =SIGTERM
        """,
    ),
    (
        "it is not measured in this version; leave it out",
        """
        --log-max-attention-logit, --log-energy,
        --save-params-interval N, --save-activations-interval N, --save-wgrads-interval N, --save-dgrads-interval N,
        --run-workload-inspector-server
        """,
    ),
    (
        "CUDA kernels that do not vary with the batch are not in this version; use --deterministic-mode",
        """
        --batch-invariant-mode
        """,
    ),
    (
        "evaluation uses the training batch sizes; use --eval-interval and --eval-iters",
        """
        --start-eval-at-iter N, --eval-global-batch-size N, --eval-micro-batch-size N, --test-mode
        """,
    ),
    (
        "evaluation alone comes with its own issue; leave it out",
        """
        --skip-train
        """,
    ),
    (
        "list the data on the command line or in --config: --data-path, or --train-data-path and --valid-data-path",
        """
        --data-args-path N, --per-split-data-args-path N, --per-dataset-sequences-path N
        """,
    ),
    (
        "data is read through memory maps from a local or mounted disk; leave it out",
        """
        --no-mmap-bin-files, --object-storage-cache-path N, --enable-msc
        """,
    ),
    (
        "samples are read once each, in an order that is a function of the seed; leave it out",
        """
        --dataloader-type N =single, --sample-rate N =1.0, --no-data-sharding
        """,
    ),
    (
        "use --reset-attention-mask, which needs no mask and no padding",
        """
        --dataloader-inter-document-masking
        """,
    ),
    (
        "fill-in-the-middle and masked language modelling are not in this version; leave it out",
        """
        --fim-data, --fim-rate N =0.5, --fim-spm-rate N =0.5, --fim-split-sample N, --fim-fragment-rate N,
        --fim-no-prefix N, --fim-prefix-token N =<fim_prefix>, --fim-middle-token N =<fim_middle>,
        --fim-suffix-token N =<fim_suffix>, --fim-pad-token N =<fim_pad>, --fim-eod-token N =<|endoftext|>,
        --mask-prob N =0.15, --short-seq-prob N =0.1
        """,
    ),
    (
        "a tokenizer is what its files say; use --tokenizer-type with --tokenizer-model",
        """
        --vocab-extra-ids N =0, --tokenizer-metadata N,
        --tokenizer-sentencepiece-legacy, --no-tokenizer-sentencepiece-ignore-extra-whitespaces,
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces, --tokenizer-hf-no-use-fast,
        --tokenizer-hf-no-include-special-tokens, --null-tokenizer-eod-id N, --null-tokenizer-pad-id N =-1,
        --chat-template N
        """,
    ),
    (
        "code from a tokenizer's folder is never run",
        """
        --trust-remote-code
        """,
    ),
    (
        "--load reads any layout, and --ckpt-step, --finetune and --no-load-optim choose what of it; use those",
        """
        --pretrained-checkpoint N, --load-main-params-from-ckpt, --override-ckpt-iteration N,
        --use-mp-args-from-checkpoint-args
        """,
    ),
    (
        "checkpoints are complete and kept until deleted in this version; use --save and --save-interval",
        """
        --non-persistent-save-interval N,
        --non-persistent-ckpt-type N, --non-persistent-global-ckpt-dir N, --non-persistent-local-ckpt-dir N,
        --non-persistent-local-ckpt-algo N =fully_parallel, --replication, --replication-jump N,
        --replication-factor N =2, --async-strategy N =nvrx, --async-ckpt-cpu-priority N =10,
        --async-ckpt-io-priority N =3, --async-ckpt-use-cpu-shm, --use-persistent-ckpt-worker,
        --ckpt-convert-format N, --ckpt-convert-save N, --ckpt-convert-update-legacy-dist-opt-format,
        --verify-integrity, --dist-ckpt-save-pre-mcore-014, --dist-ckpt-strictness N =assume_ok_unexpected,
        --dist-ckpt-format N =torch_dist, --no-ckpt-load-validate-sharding-integrity,
        --disable-ckpt-load-validate-sharding-integrity
        """,
    ),
    (
        "reinforcement learning is not part of pretraining; leave it out",
        """
        --perform-rl-step, --rl-prompts-per-eval N =32, --grpo-prompts-per-step N =32, --grpo-group-size N =2,
        --rl-generation-lag N =0, --rl-submission-granularity N =B, --rl-consumption-granularity N =B,
        --grpo-iterations N =2, --grpo-clamp-eps-lower N =0.01, --grpo-clamp-eps-upper N =0.01,
        --grpo-kl-beta N =0.001, --grpo-entropy-term-weight N =0.0, --grpo-filter-groups-with-same-reward,
        --langrl-env-config N, --rl-default-temperature N =1.0, --rl-default-top-p N =0, --rl-default-top-k N =-1,
        --rl-offload-optimizer-during-inference, --rl-kv-cache-management-mode N =persist, --rl-partial-rollouts,
        --no-rl-partial-rollouts, --rl-inference-logprobs-is-correction, --no-rl-inference-logprobs-is-correction,
        --rl-importance-sampling-truncation-coef N, --rl-use-sequence-packing, --no-rl-use-sequence-packing,
        --rl-sequence-packing-max-sequences-per-bin N =50, --rl-sequence-packing-algo N =fifo,
        --rl-inference-tensor-model-parallel-size N, --rl-inference-pipeline-model-parallel-size N,
        --rl-inference-expert-model-parallel-size N, --rl-inference-expert-tensor-model-parallel-size N,
        --rl-inference-model-unified-memory-level N =0, --rl-offload-inference-model-weights-when-idle,
        --no-rl-offload-inference-model-weights-when-idle, --refit-method N =gloo, --rl-verify-model-weights-swap,
        --no-rl-verify-model-weights-swap, --rl-skip-bos-token, --no-rl-skip-bos-token, --rl-profile,
        --rl-profile-dir N, --rl-inference-parsers N...
        """,
    ),
    (
        "inference is not part of pretraining; leave it out",
        """
        --inference-fuse-tp-communication, --inference-disable-triton-nvls-kernels,
        --inference-grouped-gemm-backend N =vllm, --inference-moe-disable-fused-quant-kernels,
        --inference-moe-token-dispatcher-type N =nvls, --inference-rng-tracker,
        --inference-batch-times-seqlen-threshold N =-1, --inference-max-requests N =8,
        --inference-max-seq-length N =2560, --inference-dynamic-batching,
        --inference-dynamic-batching-buffer-size-gb N =40.0, --inference-dynamic-batching-paused-buffer-size-gb N,
        --inference-dynamic-batching-mamba-memory-ratio N, --inference-dynamic-batching-block-size N =256,
        --inference-dynamic-batching-max-requests N, --inference-dynamic-batching-max-tokens N,
        --inference-dynamic-batching-track-paused-request-events,
        --inference-dynamic-batching-track-generated-token-events,
        --inference-dynamic-batching-unified-memory-level N =0, --inference-dynamic-batching-prefix-caching,
        --inference-dynamic-batching-prefix-caching-eviction-policy N =ref_zero,
        --inference-dynamic-batching-prefix-caching-coordinator-policy N =load_balanced,
        --inference-dynamic-batching-prefix-caching-routing-alpha N =0.5,
        --inference-dynamic-batching-prefix-caching-mamba-gb N,
        --inference-dynamic-batching-sampling-backend N =torch,
        --inference-dynamic-batching-async-sched-mode N =legacy,
        --inference-dynamic-batching-logprobs-mode N =raw_logprobs, --inference-logging-step-interval N =0,
        --inference-text-gen-server-logging, --inference-wandb-logging, --inference-coordinator-port N,
        --inference-use-synchronous-zmq-collectives, --inference-disable-ep-consensus, --inference-shards N,
        --max-tokens-to-oom N =12000, --output-bert-embeddings, --bert-embedder-type N =megatron,
        --use-legacy-static-engine, --enable-chunked-prefill, --num-speculative-tokens N =0,
        --no-inference-dynamic-batching-prefix-caching, --use-same-sampling-seed-across-dp-ranks,
        --no-inference-text-gen-server-logging, --no-inference-wandb-logging,
        --no-inference-use-synchronous-zmq-collectives, --no-inference-disable-ep-consensus, --flash-decode,
        --mlp-chunks-for-prefill N =1
        """,
    ),
    (
        "vision and retrieval models are not in this version; use a GPT",
        """
        --num-classes N =1000, --img-h N =224, --img-w N =224, --num-channels N =3, --patch-dim N =16,
        --classes-fraction N =1.0, --data-per-class-fraction N =1.0, --head-lr-mult N =1.0, --vision-pretraining,
        --vision-pretraining-type N =classify, --vision-backbone-type N =vit, --swin-backbone-type N =tiny,
        --mask-type N =random, --mask-factor N =1.0, --iter-per-epoch N =1250, --dino-local-img-size N =96,
        --dino-local-crops-number N =10, --dino-head-hidden-size N =2048, --dino-bottleneck-size N =256,
        --dino-freeze-last-layer N =1, --dino-norm-last-layer, --dino-warmup-teacher-temp N =0.04,
        --dino-teacher-temp N =0.07, --dino-warmup-teacher-temp-epochs N =30, --ict-head-size N,
        --biencoder-projection-dim N =0, --biencoder-shared-query-context-model, --ict-load N, --bert-load N,
        --titles-data-path N, --query-in-block-prob N =0.1, --use-one-sent-docs, --evidence-data-path N,
        --retriever-report-topk-accuracies N..., --retriever-score-scaling, --block-data-path N, --embedding-path N,
        --indexer-batch-size N =128, --indexer-log-interval N =1000
        """,
    ),
    (
        "fine-tuning on conversations and distillation are not in this version; leave it out",
        """
        --sft, --sft-tokenizer-prompt-format N =nemotron-h-aligned, --logits-save-top-k N, --logits-save-top-p N,
        --logits-save-top-p-min-k N =1, --logits-save-dir N, --logits-save-dtype N =fp16, --logits-load-dir N,
        --logits-load-decode-threads N =4, --logits-load-prefetch-factor N =3, --logits-load-msc-prefetch-depth N =2,
        --logits-load-kd-loss-alpha N =1.0, --logits-load-ignore-errors
        """,
    ),
)
