"""Models with gated short convolutions, and the layouts that train them as one process does."""

from megatron_ext.parts.protocol import Compared

_LFM2 = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --qk-layernorm"
)
_SIZED = f"--num-layers 4 {_LFM2} --full-attn-idxs 2"
_TP2_SP, _CP = "--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size"
_PP2 = "--pipeline-model-parallel-size 2"
_ZERO_1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_ZERO_3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
_EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 48 --moe-layer-freq [0,1,1,1] --moe-aux-loss-coeff 0.1"

COMPARISONS = (
    Compared(
        models={
            "short convolutions": _SIZED,
            "short convolutions, packed": f"{_SIZED} --conv-bias --reset-position-ids --reset-attention-mask",
            "short convolutions with experts": f"{_SIZED} --conv-l-cache 4 {_EXPERTS}",
        },
        layouts={
            "TP2 SP, short convolutions": (2, _TP2_SP),
            "TP2 SP PP2 VPP2, short convolutions": (
                4,
                f"{_TP2_SP} {_PP2} --num-virtual-stages-per-pipeline-rank 2",
            ),
            "PP2, short convolutions": (2, _PP2),
            "CP2 p2p, short convolutions": (2, f"{_CP} 2 --cp-comm-type p2p"),
            "CP4 all_gather, short convolutions, packed": (4, f"{_CP} 4 --cp-comm-type all_gather"),
            "CP2 a2a, short convolutions, packed": (2, f"{_CP} 2 --cp-comm-type a2a"),
            "DP2 distributed optimizer, overlap, short convolutions": (2, _ZERO_1),
            "TP2 SP FSDP2, short convolutions": (4, f"{_TP2_SP} --use-torch-fsdp2"),
            "TP2 SP ZeRO-3, short convolutions, packed": (4, f"{_TP2_SP} {_ZERO_3}"),
            "TP2 SP EP2, short convolutions with experts": (4, f"{_TP2_SP} --expert-model-parallel-size 2"),
        },
        quick={"TP2 SP PP2 VPP2, short convolutions", "CP4 all_gather, short convolutions, packed"},
    ),
)
