"""Lists every option of Megatron's own command line that is accepted although it changes nothing here, by reason.

Flags are separated by commas: `--flag` is a switch, `--flag N` takes a value, `--flag N...` takes several. Each gets
one warning line. The list was read from Megatron-LM as the megatron-core 0.19.2 wheel holds it;
tests/unit/test_megatron_options.py reads that wheel and fails when an option is missing here, is listed twice, or takes
another number of values.
"""

ACCEPTED: tuple[tuple[str, str], ...] = (
    (
        "attention, norms, activations and rotary embedding run on torch and are fused there where that is exact",
        """
        --no-masked-softmax-fusion, --no-rope-fusion, --no-persist-layer-norm, --no-gradient-accumulation-fusion,
        --use-flash-attn, --attention-backend N, --flash-attention-version N, --attention-softmax-in-fp32,
        --cross-entropy-loss-fusion, --cross-entropy-fusion-impl N, --fused-residual-rmsnorm,
        --disable-bf16-reduced-precision-matmul
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
        --use-cpu-initialization, --init-model-with-meta-device
        """,
    ),
    (
        "the loss is always averaged over the tokens of the whole global batch",
        """
        --calculate-per-token-loss
        """,
    ),
    (
        "communication overlap inside the linear layers is not used",
        """
        --no-tp-comm-bulk-wgrad, --no-tp-comm-bulk-dgrad, --no-tp-comm-overlap-ag, --no-tp-comm-overlap-rs,
        --no-tp-comm-split-ag, --no-tp-comm-split-rs, --disable-tp-comm-bulk-wgrad, --disable-tp-comm-bulk-dgrad,
        --disable-tp-comm-overlap-ag, --disable-tp-comm-overlap-rs, --disable-tp-comm-split-ag,
        --disable-tp-comm-split-rs
        """,
    ),
    (
        "communication is scheduled by megatron-core's defaults",
        """
        --no-align-grad-reduce, --disable-align-grad-reduce, --no-align-param-gather,
        --ddp-pad-buckets-for-high-nccl-busbw, --no-gradient-reduce-div-fusion, --no-use-layer-wise-param-layout,
        --disable-gloo-process-groups, --create-all-gather-group, --high-priority-stream-groups N...,
        --disable-symmetric-registration, --no-clone-scatter-output-in-embedding,
        --disable-clone-scatter-output-in-embedding, --distributed-timeout-seconds-after-init N
        """,
    ),
    (
        "memory and garbage collection are left to torch and Python",
        """
        --manual-gc, --manual-gc-interval N, --no-manual-gc-eval, --disable-manual-gc-eval,
        --empty-unused-memory-level N, --train-sync-interval N
        """,
    ),
    (
        "every logged quantity is always written to TensorBoard and to --metrics-file",
        """
        --log-timers-to-tensorboard, --no-log-loss-scale-to-tensorboard, --disable-log-loss-scale-to-tensorboard,
        --log-validation-ppl-to-tensorboard, --log-memory-to-tensorboard, --log-world-size-to-tensorboard,
        --log-memory-interval N, --log-device-memory-used, --log-progress, --tensorboard-queue-size N,
        --timing-log-option N, --no-barrier-with-level-1-timing, --logging-level N
        """,
    ),
    (
        "SIGTERM always saves and stops (exit code 75)",
        """
        --exit-signal-handler-for-dataloader, --exit-signal-handler-for-training
        """,
    ),
    (
        "checkpoints are always torch_dist, saved in parallel and reshardable",
        """
        --use-dist-ckpt, --auto-detect-ckpt-format, --ckpt-fully-parallel-save, --no-ckpt-fully-parallel-save,
        --ckpt-fully-parallel-load, --ckpt-fully-parallel-load-exchange-algo N,
        --ckpt-fully-parallel-save-process-group N, --ckpt-fully-parallel-load-process-group N,
        --ckpt-assume-constant-structure, --dist-ckpt-optim-fully-reshardable,
        --distrib-optim-fully-reshardable-mem-efficient, --dist-ckpt-workers N,
        --no-use-tokenizer-model-from-checkpoint-args, --disable-use-tokenizer-model-from-checkpoint-args,
        --no-strict-fsdp-dtensor-load, --disable-strict-fsdp-dtensor-load, --no-stream-ckpt-dequant,
        --disable-stream-ckpt-dequant
        """,
    ),
    (
        "the sampler needs no surplus and builds its indices without a mask",
        """
        --mid-level-dataset-surplus N, --num-dataset-builder-threads N, --no-create-attention-mask-in-dataloader,
        --dataloader-fast-cache-load, --dataloader-defer-npy-index-mmap, --allow-ambiguous-pad-tokens
        """,
    ),
    (
        "a NaN or an infinity ends the run at once (exit code 70), and no other service watches it",
        """
        --rerun-mode N, --no-one-logger, --one-logger-project N, --one-logger-run-name N, --one-logger-async,
        --app-tag-run-name N, --app-tag-run-version N, --disable-msc, --adlr-autoresume-interval N,
        --ft-num-warmup-iters N, --straggler-ctrlr-port N, --straggler-minmax-count N, --disable-straggler-on-startup,
        --flight-recorder-dump-path N, --flight-recorder-trace-buffer-size N, --no-flight-recorder-dump-on-timeout,
        --disable-flight-recorder-dump-on-timeout, --flight-recorder-include-stack-trace,
        --no-flight-recorder-include-only-active, --disable-flight-recorder-include-only-active,
        --no-flight-recorder-extra-dump-on-exec, --disable-flight-recorder-extra-dump-on-exec
        """,
    ),
)
