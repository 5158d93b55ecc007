"""Lists the layouts that are compared with one process (`cases.py`): their ranks and their flags, by names that may end
with the model, and which of them are part of every test run."""

TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
TP2_SP = f"{TP2} --sequence-parallel"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
PP2_VPP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
_PP4_VPP2 = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
BY = "--pipeline-schedule"
SPLIT = "--pipeline-model-parallel-layout"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CP2 = "--context-parallel-size 2 --cp-comm-type"
CP4 = "--context-parallel-size 4 --cp-comm-type"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FUSED = "--gradient-accumulation-fusion"
RECOMPUTED = "--recompute-granularity full --recompute-num-layers"

# Mixtures of experts. Which experts a token gets is no continuous function: two logits closer than the rounding may
# change places between layouts, and the losses part. In the 20 steps of this model the k-th and the next logit are
# never that close (docs/decisions.md has the gaps).
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
WHOLE = "--expert-tensor-parallel-size 1"  # experts that tensor parallelism does not divide
ALLTOALL = "--moe-token-dispatcher-type alltoall"

LAYOUTS = {
    "TP2": (2, TP2),
    "TP4": (4, TP4),
    "TP2 SP": (2, TP2_SP),
    "PP2": (2, PP2),
    "PP4": (4, PP4),
    "PP2 VPP2": (2, PP2_VPP2),
    "PP4 VPP2": (4, _PP4_VPP2),
    "DP2": (2, ""),
    "DP4": (4, ""),
    "DP2 distributed optimizer": (2, DISTRIBUTED),
    "DP2 distributed optimizer, overlap": (2, OVERLAP),
    "TP2 SP PP2 VPP2 DP2 distributed optimizer, overlap": (8, f"{TP2_SP} {PP2_VPP2} {OVERLAP}"),
}

# Stages that differ in their layers, on the model with 4.
UNEVEN = {
    "PP2, 1 and 3 layers": (2, f"{PP2} --decoder-first-pipeline-num-layers 1"),
    "PP3, 1, 2 and 1 layers": (
        3,
        "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
    ),
    "PP3, embedding and loss counted": (
        3,
        "--pipeline-model-parallel-size 3 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
    ),
    "PP2 VPP3, embedding and loss counted, distributed optimizer, overlap": (
        2,
        f"{PP2} --num-virtual-stages-per-pipeline-rank 3 "
        f"--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split {OVERLAP}",
    ),
    "PP2 VPP2, Ett|t|t|L, groups of 4": (
        2,
        f"{PP2} {SPLIT} Et*2|(t|)*2L --microbatch-group-size-per-virtual-pipeline-stage 4",
    ),
    "TP2 SP PP2 VPP2, E|ttt|t|L": (4, f"{TP2_SP} {PP2} {SPLIT} E|t*3|t|L"),
}
FSDP2 = "--use-torch-fsdp2"
MEGATRON_FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
TWO_COPIES = "--num-distributed-optimizer-instances 2"
# Sharding schemes: what data-parallel ranks divide.
SHARDED = {
    "FSDP2": (2, FSDP2),
    "FSDP2 on 4": (4, FSDP2),
    "FSDP2 without resharding": (2, f"{FSDP2} --torch-fsdp2-no-reshard-after-forward"),
    "FSDP2, activations checkpointed": (2, f"{FSDP2} {RECOMPUTED} 1 --recompute-method uniform"),
    "TP2 FSDP2": (4, f"{TP2} {FSDP2}"),
    "TP2 SP FSDP2": (4, f"{TP2_SP} {FSDP2}"),
    "CP2 FSDP2": (2, f"{CP2} p2p {FSDP2}"),
    "CP2 DP2 FSDP2": (4, f"{CP2} all_gather {FSDP2}"),
    "FSDP2, compiled": (2, f"{FSDP2} --torch-compile"),
    "FSDP2 in host memory": (2, f"{FSDP2} --torch-fsdp2-cpu-offload"),
    "TP2 SP FSDP2 in host memory": (4, f"{TP2_SP} {FSDP2} --torch-fsdp2-cpu-offload"),
    "PP2 FSDP2": (4, f"{PP2} {FSDP2}"),
    "PP2 VPP2 FSDP2": (4, f"{PP2_VPP2} {FSDP2}"),
    "PP2 gpipe FSDP2": (4, f"{PP2} {BY} gpipe {FSDP2}"),
    "PP2 VPP2 looped-bfs FSDP2": (4, f"{PP2_VPP2} {BY} looped-bfs {FSDP2}"),
    "TP2 SP PP2 FSDP2": (8, f"{TP2_SP} {PP2} {FSDP2}"),
    "CP2 PP2 VPP2 FSDP2": (4, f"{CP2} p2p {PP2_VPP2} {FSDP2}"),
    "PP2 VPP2 FSDP2, activations checkpointed": (4, f"{PP2_VPP2} {FSDP2} {RECOMPUTED} 1 --recompute-method uniform"),
    "PP2 VPP2 FSDP2 without resharding": (4, f"{PP2_VPP2} {FSDP2} --torch-fsdp2-no-reshard-after-forward"),
    "HSDP 2 x 2, PP2 FSDP2": (8, f"{PP2} {FSDP2} {TWO_COPIES}"),
    "Megatron-FSDP, nothing sharded": (2, f"{MEGATRON_FSDP} no_shard"),
    "Megatron-FSDP, ZeRO-1": (2, f"{MEGATRON_FSDP} optim"),
    "ZeRO-2": (2, f"{MEGATRON_FSDP} optim_grads"),
    "ZeRO-2 on 4": (4, f"{MEGATRON_FSDP} optim_grads"),
    "ZeRO-3": (2, f"{MEGATRON_FSDP} optim_grads_params"),
    "ZeRO-3 on 4": (4, f"{MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP ZeRO-2": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads"),
    "TP2 SP ZeRO-3": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "CP2 ZeRO-3": (2, f"{CP2} p2p {MEGATRON_FSDP} optim_grads_params"),
    "CP2 DP2 ZeRO-2": (4, f"{CP2} all_gather {MEGATRON_FSDP} optim_grads"),
    "ZeRO-3, activations checkpointed": (
        2,
        f"{MEGATRON_FSDP} optim_grads_params {RECOMPUTED} 1 --recompute-method uniform",
    ),
    "ZeRO-3, parts recomputed": (
        2,
        f"{MEGATRON_FSDP} optim_grads_params --recompute-granularity selective "
        "--recompute-modules core_attn mlp layernorm",
    ),
    "ZeRO-3, compiled": (2, f"{MEGATRON_FSDP} optim_grads_params --torch-compile"),
    "HSDP 2 x 2, ZeRO-2": (4, f"{MEGATRON_FSDP} optim_grads {TWO_COPIES}"),
    "HSDP 2 x 2, ZeRO-3": (4, f"{MEGATRON_FSDP} optim_grads_params {TWO_COPIES}"),
    "HSDP 2 x 2, ZeRO-3, optimizer state divided over all": (
        4,
        f"{MEGATRON_FSDP} optim_grads_params {TWO_COPIES} --outer-dp-sharding-strategy optim",
    ),
    "DP4 distributed optimizer, overlap": (4, OVERLAP),
    "HSDP 2 x 2, FSDP2": (4, f"{FSDP2} {TWO_COPIES}"),
    "HSDP 2 x 2, distributed optimizer": (4, f"{DISTRIBUTED} {TWO_COPIES}"),
    "HSDP 2 x 2, distributed optimizer, overlap": (4, f"{OVERLAP} {TWO_COPIES}"),
    "DP2 distributed optimizer, half of it in host memory": (
        2,
        f"{DISTRIBUTED} --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    ),
}
CONTEXT = {
    "CP2 p2p, tied": (2, f"{CP2} p2p"),
    "CP2 p2p, untied": (2, f"{CP2} p2p"),
    "CP2 all_gather, tied": (2, f"{CP2} all_gather"),
    "CP2 all_gather, untied": (2, f"{CP2} all_gather"),
    "CP2 a2a, tied": (2, f"{CP2} a2a"),
    "CP2 a2a, untied": (2, f"{CP2} a2a"),
    "CP2, another exchange in each layer, tied": (2, f"{CP2} p2p all_gather a2a allgather"),
    "CP4 p2p, tied": (4, f"{CP4} p2p"),
    "CP4 p2p, untied": (4, f"{CP4} p2p"),
    "CP4 all_gather, untied": (4, f"{CP4} all_gather"),
    # Four heads of keys: the other models have two.
    "CP4 a2a, learned positions, biases": (4, f"{CP4} a2a"),
    "CP4 p2p, learned positions, biases": (4, f"{CP4} p2p"),
    "TP4 SP, tied": (4, f"{TP4} --sequence-parallel"),
    "TP4 SP, untied": (4, f"{TP4} --sequence-parallel"),
    "TP2 CP2 PP2 p2p, untied": (8, f"{TP2} {CP2} p2p {PP2}"),
    "TP2 SP CP2 PP2 p2p, untied": (8, f"{TP2_SP} {CP2} p2p {PP2}"),
    "TP2 SP CP2 PP2 all_gather, tied": (8, f"{TP2_SP} {CP2} all_gather {PP2}"),
    "TP2 SP CP2 PP2 a2a, learned positions, biases": (8, f"{TP2_SP} {CP2} a2a {PP2}"),
    "TP2 SP CP4 all_gather, query and key norm, QKV bias": (8, f"{TP2_SP} {CP4} all_gather"),
    "CP2 PP2 VPP2 all_gather, untied": (4, f"{CP2} all_gather {PP2_VPP2}"),
    "CP2 DP2 p2p distributed optimizer, overlap, tied": (4, f"{CP2} p2p {OVERLAP}"),
    "CP2 DP2 all_gather distributed optimizer, untied": (4, f"{CP2} all_gather {DISTRIBUTED}"),
    "DP2, packed": (2, ""),
    "TP2 SP, packed": (2, TP2_SP),
    "PP4, packed": (4, PP4),
    "PP2 VPP2, packed, learned positions": (2, PP2_VPP2),
    "CP2 all_gather, packed": (2, f"{CP2} all_gather"),
    "CP4 all_gather, packed, learned positions": (4, f"{CP4} all_gather"),
    "CP2 a2a, packed": (2, f"{CP2} a2a"),
    "CP2, another exchange in each layer, packed": (2, f"{CP2} all_gather a2a all_gather a2a"),
    "TP2 SP CP2 PP2 all_gather, packed": (8, f"{TP2_SP} {CP2} all_gather {PP2}"),
}
"""Samples divided over ranks, or into documents: layout and model, ranks, flags."""

# Of the uneven and the divided, what is part of every test run.
QUICK = {
    "CP2 a2a, untied",
    "CP4 p2p, untied",
    "CP2 DP2 all_gather distributed optimizer, untied",
    "CP2 all_gather, packed",
    "CP2, another exchange in each layer, packed",
    "TP2 SP FSDP2, tied",
    "PP2 FSDP2, tied",
    "ZeRO-2, untied",
    "ZeRO-3, tied",
    "HSDP 2 x 2, FSDP2, untied",
    "HSDP 2 x 2, distributed optimizer, untied",
    "PP2, 1 and 3 layers, untied",
    "PP2 VPP3, embedding and loss counted, distributed optimizer, overlap, tied",
    "PP2 VPP2, Ett|t|t|L, groups of 4, tied",
}

# Layouts for each kind of division of an update: rows, columns, layers, and state in flat ranges or rows.
UPDATES = ("TP2 SP", "PP2 VPP2", "DP2 distributed optimizer, overlap", "TP2 SP FSDP2", "ZeRO-3")
QUICK_UPDATES = {"TP2 SP FSDP2"}

RECOMPUTE = {
    "full uniform": f"{RECOMPUTED} 1 --recompute-method uniform",
    "full uniform by twos": f"{RECOMPUTED} 2 --recompute-method uniform",
    "full block": f"{RECOMPUTED} 1 --recompute-method block",
    "selective": "--recompute-granularity selective",
    "selective, all parts": f"{SELECTIVE} core_attn mlp layernorm",
}
_ZBV = f"{PP2_VPP2} {BY} zbv"
# Orders of a pipeline's passes that are run as tables, most of them with backward passes in two halves.
SCHEDULES = {
    "PP2 VPP2 looped-bfs, tied": (2, f"{PP2_VPP2} {BY} looped-bfs"),
    "PP4 interleaved-zero-bubble, tied": (4, f"{PP4} {BY} interleaved-zero-bubble"),
    "PP2 VPP2 interleaved-zero-bubble, untied": (2, f"{PP2_VPP2} {BY} interleaved-zero-bubble"),
    "PP2 zbv, untied": (2, _ZBV),
    "PP2 dualpipe-v, tied": (2, f"{PP2_VPP2} {BY} dualpipe-v"),
    "TP2 SP PP2 zbv, tied": (4, f"{TP2_SP} {_ZBV}"),
    "CP2 PP2 dualpipe-v all_gather, packed": (4, f"{CP2} all_gather {PP2_VPP2} {BY} dualpipe-v"),
    "EP2 PP2 zbv, alltoall, experts": (4, f"{EP2} {_ZBV} {ALLTOALL}"),
    "PP2 zbv DP2 distributed optimizer, overlap, tied": (4, f"{_ZBV} {OVERLAP}"),
    "PP2 zbv, Ett|t|t|L, tied": (2, f"{PP2} {SPLIT} Et*2|(t|)*2L {BY} zbv"),
    "PP4 interleaved-zero-bubble FSDP2, tied": (8, f"{PP4} {BY} interleaved-zero-bubble {FSDP2}"),
    "PP2 VPP2 interleaved-zero-bubble FSDP2, untied": (4, f"{PP2_VPP2} {BY} interleaved-zero-bubble {FSDP2}"),
    "PP2 zbv FSDP2, tied": (4, f"{_ZBV} {FSDP2}"),
    "PP2 dualpipe-v FSDP2, untied": (4, f"{PP2_VPP2} {BY} dualpipe-v {FSDP2} --micro-batch-size 1"),
    "TP2 SP PP2 zbv FSDP2, untied": (8, f"{TP2_SP} {_ZBV} {FSDP2}"),
    "CP2 PP2 dualpipe-v FSDP2, packed": (4, f"{CP2} all_gather {PP2_VPP2} {BY} dualpipe-v {FSDP2}"),
    "HSDP 2 x 2, PP2 zbv FSDP2, tied": (8, f"{_ZBV} {FSDP2} {TWO_COPIES}"),
    "PP2 zbv FSDP2, activations checkpointed, untied": (4, f"{_ZBV} {FSDP2} {RECOMPUTED} 1 --recompute-method uniform"),
    "PP2 zbv FSDP2, Ett|t|t|L, tied": (4, f"{PP2} {SPLIT} Et*2|(t|)*2L {BY} zbv {FSDP2}"),
    "PP2 zbv FSDP2, one token ahead": (4, f"{_ZBV} {FSDP2}"),
}
QUICK_SCHEDULES = {"PP2 VPP2 looped-bfs, tied", "PP2 VPP2 interleaved-zero-bubble, untied", "TP2 SP PP2 zbv, tied"}
QUICK_SCHEDULES |= {"PP2 zbv FSDP2, tied", "EP2 PP2 zbv, alltoall, experts"}
# Layouts in which ranks have rows, columns, experts or whole matrices: the same cases with Muon, of these a few quick.
QUICK_MUON = {"TP4, untied", "TP2 SP FSDP2, untied", "TP2 SP EP2, tensor-parallel experts, experts"}
MUON_CASES = {
    *QUICK_MUON,
    *(f"{layout}, untied" for layout in ("TP2 SP", "PP2", "PP2 VPP2", "CP2 p2p", "DP2", "FSDP2", "ZeRO-2", "ZeRO-3")),
    "PP2 FSDP2, untied",
    *(f"DP{ranks} distributed optimizer, overlap, untied" for ranks in (2, 4)),
    *(f"HSDP 2 x 2, {scheme}, untied" for scheme in ("distributed optimizer", "FSDP2")),
    *("Megatron-FSDP, ZeRO-1, untied", "HSDP 2 x 2, ZeRO-3, optimizer state divided over all, untied"),
    *("EP2, experts", "EP2 ZeRO-3, experts", "TP2 SP CP2 EP2, distributed optimizer, experts"),
    *("TP2 SP PP2 VPP2, latents", "TP2 SP ZeRO-3, latents", "TP4, sinks and gates", "TP2 SP FSDP2, sinks and gates"),
    "TP2 SP PP2 VPP2 DP2 distributed optimizer, overlap, untied",
}
ADAFACTOR_OF_EXPERTS = {"EP2, experts", "EP2 ZeRO-3, experts", "TP2 SP EP2, tensor-parallel experts, experts"}
