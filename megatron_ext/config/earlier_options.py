"""Lists options of earlier releases of Megatron-LM, and of its forks, that have no bearing here.

Megatron 0.19 itself does not know these any more, but scripts of other years and places are full of them. Each gets
one warning line that says what happens instead. The notation is that of `megatron_accepted.py`. The list is from memory
of those releases: what is not in it is an unknown flag, which is refused or, with --allow-unknown-flags, left out.
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
        --use-contiguous-buffers-in-ddp, --use-contiguous-parameters-in-local-ddp
        """,
    ),
    (
        "communication is scheduled by megatron-core's defaults",
        """
        --no-async-tensor-model-parallel-allreduce, --no-scatter-gather-tensors-in-pipeline, --delay-grad-reduce,
        --no-delay-grad-reduce, --delay-param-gather, --overlap-p2p-communication, --use-mc2, --use-ascend-mc2,
        --use-cp-send-recv-overlap
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
        --abort-on-unmet-fused-kernel-constraints, --disable-te-fused-rope, --use-fused-rmsnorm, --use-fused-swiglu,
        --use-fused-rotary-pos-emb, --use-fused-sdpa N, --use-fused-sdpa-with-recompute N, --use-fast-softmax
        """,
    ),
    (
        "what is kept for recomputation stays on the device, as --recompute-granularity says",
        """
        --distribute-checkpointed-activations, --partition-activations, --contigious-checkpointing,
        --checkpoint-in-cpu, --synchronize-each-layer, --profile-backward, --swap-attention
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
)
