"""Lists every option of Megatron's own command line that has no bearing here, with what happens instead, by reason.

These options are about the speed, the memory or the bookkeeping of Megatron's own implementation, or ask for behavior
that is the only one here: no trained weight and no saved file depends on them.

Flags are separated by commas: `--flag` is a switch, `--flag N` takes a value, `--flag N...` takes several. Each gets
one warning line; `=value` asks for nothing, and passes silently. The list was read from Megatron-LM as the
megatron-core 0.19.2 wheel holds it; tests/plugins/megatron_lm/test_megatron_options.py reads that wheel and fails when
an option is missing here, is listed twice, or takes another number of values.
"""

ACCEPTED: tuple[tuple[str, str], ...] = (
    (
        "attention, norms, activations and rotary embedding run on torch and are fused there where that is exact",
        """
        --no-masked-softmax-fusion, --no-rope-fusion, --no-persist-layer-norm, --use-flash-attn,
        --attention-softmax-in-fp32, --fused-residual-rmsnorm
        """,
    ),
    (
        "layers are as --hybrid-layer-pattern says, and Mamba-2 keeps little of a sequence in any case",
        """
        --is-hybrid-model, --disable-mamba-mem-eff-path
        """,
    ),
    (
        "YaRN rounds the indices of channels, unless --no-yarn-correction-range-round-to-int is given",
        """
        --yarn-correction-range-round-to-int
        """,
    ),
    (
        "a Hadamard transform of the indexer's queries and keys changes no product of them, and is left out",
        """
        --no-dsa-indexer-rotate-activation, --disable-dsa-indexer-rotate-activation
        """,
    ),
    (
        "the multiple of the width is --hidden-size over --mup-base-hidden-size, as Megatron computes it anew",
        """
        --mup-width-mult N =1.0
        """,
    ),
    (
        "FP8 scales are those of the tensor itself at each use (--fp8-recipe), so that no history of maxima is kept",
        """
        --fp8-amax-history-len N =1, --fp8-amax-compute-algo N =most_recent, --fp8-interval N =1
        """,
    ),
    (
        "weights are gathered in bf16, and rounded to few bits from there where they are used",
        """
        --fp4-param-gather, --reuse-grad-buf-for-mxfp8-param-ag
        """,
    ),
    (
        "the output layer and its loss are computed together only where --linear-cross-entropy asks for it, exactly",
        """
        --cross-entropy-loss-fusion, --cross-entropy-fusion-impl N
        """,
    ),
    (
        "GELU and its bias are never fused",
        """
        --no-bias-gelu-fusion
        """,
    ),
    (
        "megatron-core is always the engine",
        """
        --use-mcore-models, --lazy-mpu-init, --local-rank N
        """,
    ),
    (
        "weights are a function of the seed and the parameter's name, drawn slice by slice on every device",
        """
        --use-cpu-initialization, --init-model-with-meta-device, --no-initialization
        """,
    ),
    (
        "the loss is always averaged over the tokens of the whole global batch (without this flag, Megatron averages "
        "the means of the microbatches, which is the same where each has as many tokens that count)",
        """
        --calculate-per-token-loss
        """,
    ),
    (
        "--tp-comm-overlap takes torch's operators, which have none of Transformer Engine's settings",
        """
        --no-tp-comm-bulk-wgrad, --no-tp-comm-bulk-dgrad, --no-tp-comm-overlap-ag, --no-tp-comm-overlap-rs,
        --no-tp-comm-split-ag, --no-tp-comm-split-rs, --disable-tp-comm-bulk-wgrad,
        --disable-tp-comm-bulk-dgrad, --disable-tp-comm-overlap-ag, --disable-tp-comm-overlap-rs,
        --disable-tp-comm-split-ag, --disable-tp-comm-split-rs, --tp-comm-overlap-rs-dgrad,
        --tp-comm-bootstrap-backend N =nccl, --tp-comm-overlap-cfg N
        """,
    ),
    (
        "communication is scheduled by megatron-core's defaults",
        """
        --no-align-grad-reduce, --disable-align-grad-reduce, --no-align-param-gather,
        --ddp-pad-buckets-for-high-nccl-busbw, --no-gradient-reduce-div-fusion,
        --no-use-layer-wise-param-layout, --disable-gloo-process-groups, --create-all-gather-group,
        --high-priority-stream-groups N..., --disable-symmetric-registration,
        --no-clone-scatter-output-in-embedding, --disable-clone-scatter-output-in-embedding,
        --overlap-param-gather-with-optimizer-step
        """,
    ),
    (
        "documents end with the tokenizer's own token",
        """
        --fim-eod-token N =<|endoftext|>
        """,
    ),
    (
        "freed memory is left to torch, which keeps it for the next step",
        """
        --empty-unused-memory-level N, --train-sync-interval N
        """,
    ),
    (
        "every logged quantity is always written to TensorBoard and to --metrics-file",
        """
        --log-timers-to-tensorboard, --no-log-loss-scale-to-tensorboard, --disable-log-loss-scale-to-tensorboard,
        --log-validation-ppl-to-tensorboard, --log-memory-to-tensorboard, --log-world-size-to-tensorboard,
        --log-memory-interval N, --log-device-memory-used, --timing-log-option N, --no-barrier-with-level-1-timing,
        --logging-level N
        """,
    ),
    (
        "there is no progress.txt: --metrics-file has a row of each step, and --save a row of each start",
        """
        --log-progress
        """,
    ),
    (
        "TensorBoard's own queue is used",
        """
        --tensorboard-queue-size N
        """,
    ),
    (
        "SIGTERM always saves and stops (exit code 75)",
        """
        --exit-signal-handler-for-dataloader, --exit-signal-handler-for-training, --adlr-autoresume
        """,
    ),
    (
        "checkpoints are torch_dist and reshardable; --ckpt-fully-parallel-save and -load say who writes and who reads",
        """
        --use-dist-ckpt, --auto-detect-ckpt-format, --no-ckpt-fully-parallel-save,
        --ckpt-fully-parallel-load-exchange-algo N, --ckpt-fully-parallel-save-process-group N,
        --ckpt-fully-parallel-load-process-group N,
        --ckpt-assume-constant-structure, --dist-ckpt-optim-fully-reshardable,
        --distrib-optim-fully-reshardable-mem-efficient, --dist-ckpt-workers N,
        --no-strict-fsdp-dtensor-load, --disable-strict-fsdp-dtensor-load, --no-stream-ckpt-dequant,
        --disable-stream-ckpt-dequant, --dist-ckpt-format N =torch_dist, --dist-ckpt-save-pre-mcore-014
        """,
    ),
    (
        "no mask is made with the data: attention masks what comes later by itself",
        """
        --no-create-attention-mask-in-dataloader
        """,
    ),
    (
        "the sampler needs no surplus and builds its indices without a mask",
        """
        --mid-level-dataset-surplus N, --num-dataset-builder-threads N,
        --dataloader-fast-cache-load, --dataloader-defer-npy-index-mmap, --allow-ambiguous-pad-tokens,
        --per-dataset-sequences-path N
        """,
    ),
    (
        "all samples are shuffled once an epoch, in an order that is a function of the seed and the same in every "
        "layout, and are not shuffled once more",
        """
        --dataloader-type N =single
        """,
    ),
    (
        "data in a store (--data-path s3://...) is read by fsspec, and its .idx files are copied once a machine",
        """
        --object-storage-cache-path N, --enable-msc
        """,
    ),
    (
        "torch's flight recorder follows its own variables (TORCH_FR_BUFFER_SIZE, TORCH_FR_DUMP_TEMP_FILE), and a run "
        "whose ranks wait too long says by itself which of them hold it up",
        """
        --flight-recorder-dump-path N, --flight-recorder-trace-buffer-size N,
        --no-flight-recorder-dump-on-timeout, --disable-flight-recorder-dump-on-timeout,
        --flight-recorder-include-stack-trace, --no-flight-recorder-include-only-active,
        --disable-flight-recorder-include-only-active, --no-flight-recorder-extra-dump-on-exec,
        --disable-flight-recorder-extra-dump-on-exec
        """,
    ),
    (
        "--distributed-timeout-minutes holds for the first collectives and for all after them",
        """
        --distributed-timeout-seconds-after-init N
        """,
    ),
    (
        "a NaN or an infinity ends the run at once (exit code 70), and no other service watches it",
        """
        --rerun-mode N, --no-one-logger, --one-logger-project N, --one-logger-run-name N, --one-logger-async,
        --app-tag-run-name N, --app-tag-run-version N, --disable-msc, --adlr-autoresume-interval N,
        --ft-num-warmup-iters N, --straggler-ctrlr-port N, --straggler-minmax-count N,
        --disable-straggler-on-startup, --gpu-sniff-test-interval N,
        --result-rejected-tracker-filename N
        """,
    ),
    (
        "--spike-threshold says what a spike is, and runs its batch again",
        """
        --check-for-spiky-loss
        """,
    ),
    (
        "what is computed is the same without this fusion, overlap or kernel, which belongs to Megatron's own layers",
        """
        --moe-permute-fusion, --moe-router-fusion, --moe-shared-expert-overlap,
        --overlap-dispatch-backward-with-experts-wgrad,
        --ep-overlap-early-attn-memory-release, --high-priority-a2a-comm-stream,
        --use-grouped-gemm-for-shared-expert, --use-grouped-gemm-for-dense-mlp,
        --use-fused-weighted-squared-relu, --use-te-activation-func, --use-transformer-engine-op-fuser,
        --te-rng-tracker, --enable-experimental
        """,
    ),
    (
        "tokens are sent to their experts by torch.distributed, and by no other library",
        """
        --moe-flex-dispatcher-backend N =deepep, --moe-permute-fusion-into-hybridep,
        --moe-hybridep-pad-uneven-dispatch-inputs, --moe-flex-dispatcher-num-sms N, --moe-deepep-num-sms N,
        --moe-hybridep-num-sms N, --moe-hybridep-num-blocks-permute N, --moe-hybridep-num-blocks-unpermute N,
        --moe-hybridep-num-sms-preprocessing N =108, --moe-ncclep-static-shape, --moe-ncclep-zero-copy
        """,
    ),
    (
        "experts are computed in the precision of --bf16 or --fp16, which needs no padding of their tokens",
        """
        --moe-router-padding-for-quantization, --moe-router-padding-for-fp8
        """,
    ),
    (
        "experts compute the tokens that --moe-expert-capacity-factor leaves them, and no padding, to the same result",
        """
        --moe-pad-expert-input-to-capacity
        """,
    ),
    (
        "what the experts keep for the backward pass stays on the device; --recompute-granularity saves memory",
        """
        --moe-paged-stash, --moe-paged-stash-page-size N =64,
        --moe-paged-stash-buffer-size-factor-cuda N =1.1, --moe-paged-stash-buffer-size-factor-cpu N =0.0
        """,
    ),
    (
        "activations stay on the device; --recompute-granularity saves memory",
        """
        --cpu-offloading-retain-pinned-cpu-buffers,
        --fine-grained-offloading-max-inflight-offloads N,
        --offload-modules N..., --min-offloaded-tensor-size N =1048576, --delay-offload-until-cuda-graph,
        --delta-offload-bytes-across-pp-ranks N =0, --activation-offload-fraction N =1.0,
        --distribute-saved-activations, --mlp-chunks-for-training N =1
        """,
    ),
    (
        "CUDA graphs are made of the passes of whole steps, by --cuda-graph-impl full_iteration; without them steps "
        "compute the same",
        """
        --enable-cuda-graph, --external-cuda-graph, --optimizer-cuda-graph, --cuda-graph-scope N...,
        --cuda-graph-modules N...
        """,
    ),
    (
        "the pipeline runs megatron-core's own schedule",
        """
        --overlap-p2p-communication-warmup-flush, --use-ring-exchange-p2p, --defer-embedding-wgrad-compute,
        --wgrad-deferral-limit N =0, --pipeline-model-parallel-comm-backend N
        """,
    ),
    (
        "Megatron-FSDP gathers and reduces with its plain buffers",
        """
        --fsdp-manual-registration, --fsdp-double-buffer, --fsdp-db-use-persist-buf-on-alloc-fail,
        --megatron-fsdp-enable-fine-grained-param-gather, --megatron-fsdp-max-pool-double-buffer,
        --suggested-communication-unit-size N, --keep-fp8-transpose-cache
        """,
    ),
    (
        "gradients are scaled and then summed, which is the average, in buckets of --ddp-bucket-size",
        """
        --ddp-average-in-collective, --ddp-num-buckets N
        """,
    ),
    (
        "NCCL is tuned by its own environment variables alone",
        """
        --use-sharp, --sharp-enabled-group N, --nccl-communicator-config-path N,
        --symmetric-ar-type N, --nccl-all-reduce-for-prefill
        """,
    ),
    (
        "attention computes its softmax in fp32, where scaling by the layer's number before it and back in it cancels",
        """
        --apply-query-key-layer-scaling
        """,
    ),
    (
        "the loss is computed in fp32, whatever the logits are in",
        """
        --fp16-lm-cross-entropy
        """,
    ),
    (
        "--main-grads-dtype, --exp-avg-dtype and --exp-avg-sq-dtype say by themselves what is kept in 16 bits",
        """
        --use-precision-aware-optimizer
        """,
    ),
    (
        "code from a tokenizer's folder is never run; a tokenizer that needs it is refused",
        """
        --trust-remote-code
        """,
    ),
    (
        "it is not measured, and not in the log",
        """
        --log-energy, --run-workload-inspector-server, --moe-per-layer-logging,
        --config-logger-dir N, --dump-param-to-param-group-map N
        """,
    ),
    (
        "nothing is generated in pretraining but by --sample-interval, which has its own way",
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
        --max-tokens-to-oom N =12000,
        --use-legacy-static-engine, --enable-chunked-prefill,
        --no-inference-dynamic-batching-prefix-caching, --use-same-sampling-seed-across-dp-ranks,
        --no-inference-text-gen-server-logging, --no-inference-wandb-logging,
        --no-inference-use-synchronous-zmq-collectives, --no-inference-disable-ep-consensus, --flash-decode,
        --mlp-chunks-for-prefill N =1, --inference-cuda-graph-scope N,
        --inference-dynamic-batching-num-cuda-graphs N =16, --decode-only-cuda-graphs,
        --inference-cuda-graph-all-prefills, --inference-cuda-graph-max-tokens N =512,
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count N =16,
        --inference-dynamic-batching-cuda-graph-sizing-distribution N =exponential
        """,
    ),
    (
        "a run that lost a rank ends (exit code 76); torchrun --max-restarts with --save and --load goes on "
        "from its checkpoint",
        """
        --enable-ft-package, --calc-ft-timeouts, --inprocess-restart, --inprocess-max-iterations N,
        --inprocess-monitor-thread-interval N =1.0, --inprocess-monitor-process-interval N =1.0,
        --inprocess-progress-watchdog-interval N =1.0, --inprocess-heartbeat-interval N =30,
        --inprocess-soft-timeout N =60, --inprocess-hard-timeout N =90, --inprocess-heartbeat-timeout N =60,
        --inprocess-barrier-timeout N =120, --inprocess-completion-timeout N =120,
        --inprocess-last-call-wait N =1, --inprocess-termination-grace-time N =1,
        --inprocess-granularity N =node, --inprocess-active-world-size N =1, --inprocess-empty-cuda-cache
        """,
    ),
    (
        "checkpoints are written by a background thread of each rank with --async-save, else by the rank itself",
        """
        --use-persistent-ckpt-worker, --async-strategy N =nvrx, --async-ckpt-cpu-priority N =10,
        --async-ckpt-io-priority N =3, --async-ckpt-use-cpu-shm
        """,
    ),
    (
        "a checkpoint's files are always checked, and one without a tensor of the model, or with another shape, is "
        "refused",
        """
        --dist-ckpt-strictness N =assume_ok_unexpected, --verify-integrity,
        --no-ckpt-load-validate-sharding-integrity, --disable-ckpt-load-validate-sharding-integrity
        """,
    ),
    (
        "a norm's weights are kept as they multiply, and not less one; they train alike, since norms have no weight "
        "decay (by --apply-wd-to-qk-layernorm those of queries and keys decay to 0, not to 1), but for where weights "
        "of 16 bits are rounded",
        """
        --apply-layernorm-1p
        """,
    ),
    (
        "the checks of a run are those of its flags",
        """
        --test-mode
        """,
    ),
    (
        "context-parallel ranks exchange keys in one group, as --cp-comm-type says",
        """
        --hierarchical-context-parallel-sizes N...
        """,
    ),
)

SLOWER_OR_LARGER: tuple[tuple[str, str], ...] = (
    (
        "no other work hides the way of tokens to their experts, so that steps with --expert-model-parallel-size above "
        "1 take longer",
        """
        --overlap-moe-expert-parallel-comm
        """,
    ),
    (
        "tokens are sent to their experts by torch.distributed's all-to-all, which takes longer between machines than "
        "DeepEP's kernels; --moe-token-dispatcher-type alltoall asks for it by name",
        """
        --moe-enable-deepep
        """,
    ),
    (
        "weight gradients are computed next to the input's, so that a pipeline idles as long as in 1F1B; "
        "--pipeline-schedule interleaved-zero-bubble delays them",
        """
        --delay-wgrad-compute
        """,
    ),
    (
        "activations stay on the device, whose memory must hold them; --recompute-granularity saves memory",
        """
        --cpu-offloading-num-layers N =0, --fine-grained-activation-offloading
        """,
    ),
    (
        "NCCL copies through buffers of its own, which cost it memory and some of a GPU's multiprocessors",
        """
        --use-nccl-ub
        """,
    ),
)
"""The same notation for options that would save time or memory: the training is the same without them."""
