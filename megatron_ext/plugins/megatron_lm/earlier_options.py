"""Lists options of earlier releases of Megatron-LM, and of its forks, that have no bearing here.

Megatron 0.19 itself does not know these any more, but scripts of other years and places are full of them. Each gets one
warning line about what happens instead. The notation is as in `megatron_accepted.py`; `--flag [N]` may take a value.
The list is from memory of those releases and from launch scripts (tests/golden/other_launches.json): any other flag is
unknown: it is refused or, with --allow-unknown-flags, left out.
"""

EARLIER: tuple[tuple[str, str], ...] = (
    (
        "a data set is a pair of .bin and .idx files, which is what mmap reads",
        """
        --data-impl N =mmap;infer
        """,
    ),
    (
        "megatron-core's own data parallelism is always used, with its buffers of gradients",
        """
        --DDP-impl N =local, --no-contiguous-buffers-in-local-ddp, --use-contiguous-buffers-in-local-ddp,
        --use-contiguous-buffers-in-ddp, --use-contiguous-parameters-in-local-ddp, --zero-reduce-scatter,
        --zero-contiguous-gradients, --zero-contigious-gradients, --zero-allgather-bucket-size N,
        --zero-reduce-bucket-size N, --force-ds-sequence-parallel, --ds-fused-adam, --use-pin-memory
        """,
    ),
    (
        "communication is scheduled by megatron-core's defaults",
        """
        --no-async-tensor-model-parallel-allreduce, --no-scatter-gather-tensors-in-pipeline, --delay-grad-reduce,
        --no-delay-grad-reduce, --delay-param-gather, --overlap-p2p-communication, --use-mc2, --use-ascend-mc2,
        --use-cp-send-recv-overlap, --moe-permutation-async-comm, --moe-alltoall-overlap-comm,
        --moe-allgather-overlap-comm, --moe-fb-overlap, --use-ascend-coc, --coc-fused-kernel,
        --use-fused-ring-attention-update, --hccl-op-mode N, --disable-gloo-group, --variable-seq-lengths
        """,
    ),
    (
        "attention computes its softmax in fp32, where scaling by the layer's number before it and back in it cancels",
        """
        --no-query-key-layer-scaling
        """,
    ),
    (
        "attention, norms, activations and rotary embedding run on torch and are fused there where that is exact",
        """
        --use-ck-flash-attn, --use-flash-attn-ck, --use-flash-attn-v1, --use-flash-attn-v2, --use-flash-attn-triton,
        --use-flash-attn-builder, --scaled-upper-triang-masked-softmax-fusion, --scaled-masked-softmax-fusion,
        --abort-on-unmet-fused-kernel-constraints, --disable-te-fused-rope, --use-fused-rmsnorm [N], --use-fused-swiglu,
        --use-fused-rotary-pos-emb, --use-fused-sdpa N, --use-fused-sdpa-with-recompute N, --use-fast-softmax [N],
        --use-fused-moe-token-permute-and-unpermute, --gemm-gradient-accumulation-fusion, --shape-order N,
        --mla-fa-without-pad, --mla-mm-split, --mla-up-proj-tp-overlap
        """,
    ),
    (
        "the launcher's variables say which rank a process is, torchrun's, mpirun's or srun's",
        """
        --use-mpi, --deepspeed-mpi
        """,
    ),
    (
        "layers are compiled by --torch-compile alone",
        """
        --use-torch-compile N =0, --use-torch-compiled-autograd N =0, --use-regional-compilation N =0,
        --allow-unspec-int-on-nn-module N =0, --cache-size-limit N =0, --use-te-custom-op N =0
        """,
    ),
    (
        "megatron-core's model and its own pipeline schedules are always used",
        """
        --use-legacy-models, --schedules-method N, --enable-zbh1-exact-semantics
        """,
    ),
    (
        "attention is causal; --reset-attention-mask keeps documents apart",
        """
        --attention-mask-type N =causal
        """,
    ),
    (
        "what is kept for recomputation stays on the device, as --recompute-granularity says",
        """
        --distribute-checkpointed-activations, --deepspeed-activation-checkpointing, --partition-activations,
        --contigious-checkpointing,
        --checkpoint-in-cpu, --synchronize-each-layer, --profile-backward, --swap-attention,
        --recompute-activation-function, --recompute-activation-function-num-layers N, --recompute-norm,
        --recompute-norm-num-layers N, --recompute-in-advance, --enable-recompute-layers-per-pp-rank,
        --moe-zero-memory N, --moe-zero-memory-num-layers N
        """,
    ),
    (
        "weights and what the optimizer keeps stay on the device, in fp32; --optimizer-cpu-offload saves that memory",
        """
        --swap-optimizer, --swap-optimizer-times N, --reuse-fp32-param
        """,
    ),
    (
        "the loss needs its logits until the backward pass; --linear-cross-entropy keeps none of them",
        """
        --mtp-mem-efficient-logits
        """,
    ),
    (
        "data are .bin and .idx files, prepared before training, which ranks need not share",
        """
        --handler-name N, --no-shared-storage
        """,
    ),
    (
        "samples of pretraining are packed to --seq-length",
        """
        --max-padding-length N
        """,
    ),
    (
        "--make-vocab-size-divisible-by pads the vocabulary, with rows that take no probability",
        """
        --extra-vocab-size N
        """,
    ),
    (
        "a file named stop in --save saves and ends the run",
        """
        --trigger-path N, --kill-switch-path N
        """,
    ),
    (
        "the log is rank 0's and the last rank's, and --metrics-file has every logged quantity",
        """
        --log-level N, --log-level-replica N, --structured-logs, --structured-logs-dir N, --codecarbon-dir N
        """,
    ),
    (
        "checkpoints are written by the ranks that hold their parts, and always checked",
        """
        --save-distrib-optimizer-method N, --load-distrib-optimizer-method N, --verify-checkpoint,
        --verify-checkpoint-model-type N
        """,
    ),
    (
        "validation is read by as many workers as training, --num-workers",
        """
        --valid-num-workers N
        """,
    ),
    (
        "weights that ranks share are equal from the start, and --check-replicated-weights-interval sees to it",
        """
        --sync-tp-duplicated-parameters
        """,
    ),
    (
        "every logged quantity is always written to TensorBoard and to --metrics-file",
        """
        --log-batch-size-to-tensorboard, --log-learning-rate-to-tensorboard, --no-log-learning-rate-to-tensorboard,
        --no-log-learnig-rate-to-tensorboard, --log-optimizer-states-to-tensorboard
        """,
    ),
    # Of later releases than the one whose wheel is read.
    (
        "no OpenTelemetry is sent; --metrics-file and TensorBoard have every logged quantity",
        """
        --otel-enabled, --otel-service-name N, --otel-span-groups N
        """,
    ),
    (
        "a checkpoint names its tokenizer and keeps the files that an export needs in any case",
        """
        --no-save-tokenizer-assets, --disable-save-tokenizer-assets
        """,
    ),
    (
        "layers of ours have no extra state, and that of others is kept",
        """
        --ckpt-drop-redundant-extra-state
        """,
    ),
    (
        "NCCL copies through buffers of its own",
        """
        --gtp-remat-nccl-ub, --gtp-expert-remat-nccl-ub
        """,
    ),
    (
        "what is computed is the same without this kernel, which belongs to Megatron's own layers",
        """
        --moe-use-grouped-tensor, --gdp-cutedsl-kernel, --gdp-num-chunk-states-to-recompute N =2, --muon-use-syrk,
        --batch-invariant-backend N =te_native, --gtp-remat-opt-in-modules N...
        """,
    ),
    (
        "checkpoints are read by the ranks that need their parts, as --ckpt-fully-parallel-load says",
        """
        --ckpt-fully-parallel-load-per-rank-objects, --ckpt-pg-tensors-cache-path N, --ckpt-pg-tensors-cache-create,
        --universal-checkpoint
        """,
    ),
    (
        "texts are tokenized before the training, by gigatoken where it is installed",
        """
        --use-gigatoken
        """,
    ),
)


SLOWER_OR_LARGER: tuple[tuple[str, str], ...] = (
    (
        "weight gradients are computed next to the input's, so that a pipeline idles as long as in 1F1B; "
        "--pipeline-schedule interleaved-zero-bubble delays them",
        """
        --enable-zbh1-pipeline
        """,
    ),
)
"""The same notation for options that would save time or memory: the training is the same without them."""


REFUSED_OF_FORKS: tuple[tuple[str, str], ...] = (
    (
        "recorded passes of the pipeline went; use --profile --use-pytorch-profiler, whose trace of each rank Perfetto "
        "shows",
        """
        --record-schedule
        """,
    ),
    (
        "a run ends after 100 steps in a row that overflow at the least loss scale, or half of its steps, and names a "
        "scale that would do; leave it out",
        """
        --loss-scale-patience N
        """,
    ),
    (
        "of a mixture of experts, this part is not in this version; leave it out, docs/experts.md has the others",
        """
        --first-k-dense-replace N =0;-1, --moe-min-capacity N, --moe-train-capacity-factor N,
        --moe-eval-capacity-factor N, --moe-capacity-factor N
        """,
    ),
    (
        "lengths that grow are --stages FILE here, with lines as `1000: {seq_length: 2048}`; give that instead",
        """
        --curriculum-learning, --data-efficiency-curriculum-learning
        """,
    ),
    (
        "all layers compute all tokens here; leave it out",
        """
        --random-ltd
        """,
    ),
    (
        "--data-path reads .bin and .idx files, which megatron-ext preprocess writes; leave it out",
        """
        --dataset N =MMAP;mmap
        """,
    ),
    (
        "conversations are tokenized once, before training: megatron-ext preprocess --data-format messages, then "
        "--assistant-only-loss",
        """
        --train-mode N =pretrain
        """,
    ),
    # Of later releases than the one whose wheel is read.
    (
        "logits have the precision of the output layer's input, and their cross-entropy is in fp32; leave it out",
        """
        --output-logit-dtype N
        """,
    ),
    (
        "each weight has one shard per tensor-parallel rank; use --tensor-model-parallel-size",
        """
        --gtp-remat-reduce-scatter-with-fp32-accumulation
        """,
    ),
    (
        "Megatron-FSDP is that of megatron-core; leave it out, or use --use-torch-fsdp2",
        """
        --megatron-fsdp-version N =1
        """,
    ),
    (
        "reinforcement learning is not in this version; leave it out",
        """
        --rl-max-inflight-requests N, --rl-durable-rollout-bank, --rl-rollout-bank-dir N,
        --rl-rollout-bank-max-bytes N =0
        """,
    ),
    (
        "this kind of layer is not in this version; leave it out",
        """
        --mtp-hsm, --enable-mhc-connections, --mhc-num-residual-streams N =4, --mhc-sinkhorn-iterations N =20,
        --mhc-init-gating-factor N =0.01, --mhc-recompute-layer-num N, --gdp-num-householder N =3
        """,
    ),
    (
        "tokens travel in bf16; leave it out",
        """
        --moe-dispatch-fwd-dtype N =bf16, --moe-combine-bwd-dtype N =bf16
        """,
    ),
)
"""The same notation for options of forks that would change the training; `=value` asks for nothing."""
