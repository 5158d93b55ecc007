"""Models with Mamba-1 layers, and the layouts that train them as one process does."""

from megatron_ext.parts.protocol import Compared

_SHAPE = (
    "--position-embedding-type none --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --scan-state-dim 6 --scan-channels 88 "
    "--norm-epsilon 1e-3"
)
_HYBRID = f"{_SHAPE} --hybrid-layer-pattern S-S*"
_PACKED = "--reset-position-ids --reset-attention-mask"
_TP2_SP, _CP = "--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size"
_PP2 = "--pipeline-model-parallel-size 2"
_ZERO_1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_ZERO_3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
_EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.1 --moe-router-pre-softmax"
_SELECTIVE = "--recompute-granularity selective"

COMPARISONS = (
    Compared(
        models={
            "Mamba-1 hybrid": f"{_HYBRID} --scan-norm with-weights",
            "Mamba-1 hybrid, packed": f"{_HYBRID} --scan-norm without-weights --scan-bias {_PACKED}",
            "Mamba-1 hybrid with experts": f"{_SHAPE} --hybrid-layer-pattern S-SE*-SE {_EXPERTS} --no-scan-conv-bias",
        },
        layouts={
            "TP2 SP PP2 VPP2, Mamba-1 hybrid": (4, f"{_TP2_SP} {_PP2} --num-virtual-stages-per-pipeline-rank 2"),
            "CP2 p2p, recompute selective, Mamba-1 hybrid": (2, f"{_CP} 2 --cp-comm-type p2p {_SELECTIVE}"),
            "CP4 all_gather, Mamba-1 hybrid, packed": (4, f"{_CP} 4 --cp-comm-type all_gather"),
            "TP2 CP2 all_gather, recompute selective, Mamba-1 hybrid, packed": (
                4,
                f"--tensor-model-parallel-size 2 {_CP} 2 --cp-comm-type all_gather {_SELECTIVE}",
            ),
            "DP2 distributed optimizer, overlap, Mamba-1 hybrid": (2, _ZERO_1),
            "TP2 SP FSDP2, Mamba-1 hybrid": (4, f"{_TP2_SP} --use-torch-fsdp2"),
            "TP2 SP ZeRO-3, Mamba-1 hybrid": (4, f"{_TP2_SP} {_ZERO_3}"),
            "TP2 SP EP2, Mamba-1 hybrid with experts": (4, f"{_TP2_SP} --expert-model-parallel-size 2"),
        },
        quick={"TP2 SP PP2 VPP2, Mamba-1 hybrid", "CP4 all_gather, Mamba-1 hybrid, packed"},
    ),
)
