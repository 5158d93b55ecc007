"""Lists the layouts that are compared with one process (`verify/cases.py`): their ranks and their flags, by names that
may end with the model, and which of them are part of every test run."""

TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
_PP2 = "--pipeline-model-parallel-size 2"
_PP2_VPP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
_PP4_VPP2 = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
_BY = "--pipeline-schedule"
_SPLIT = "--pipeline-model-parallel-layout"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_CP2 = "--context-parallel-size 2 --cp-comm-type"
_CP4 = "--context-parallel-size 4 --cp-comm-type"
_RECOMPUTE = "--recompute-granularity full --recompute-num-layers"

LAYOUTS = {
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP4": (4, "--tensor-model-parallel-size 4"),
    "TP2 SP": (2, TP2_SP),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "PP2 VPP2": (2, _PP2_VPP2),
    "PP4 VPP2": (4, _PP4_VPP2),
    "DP2": (2, ""),
    "DP4": (4, ""),
    "DP2 distributed optimizer": (2, "--use-distributed-optimizer"),
    "DP2 distributed optimizer, overlap": (2, _OVERLAP),
    "TP2 SP PP2 VPP2 DP2 distributed optimizer, overlap": (8, f"{TP2_SP} {_PP2_VPP2} {_OVERLAP}"),
}

# Stages that differ in their layers, on the model with 4.
UNEVEN = {
    "PP2, 1 and 3 layers": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
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
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 "
        f"--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split {_OVERLAP}",
    ),
    "PP2 VPP2, Ett|t|t|L, groups of 4": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*2|(t|)*2L "
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
    ),
    "TP2 SP PP2 VPP2, E|ttt|t|L": (
        4,
        f"{TP2_SP} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t*3|t|L",
    ),
}
_FSDP2 = "--use-torch-fsdp2"
_MEGATRON_FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
_TWO_COPIES = "--num-distributed-optimizer-instances 2"
# What data-parallel ranks divide among themselves.
SHARDED = {
    "FSDP2": (2, _FSDP2),
    "FSDP2 on 4": (4, _FSDP2),
    "FSDP2 without resharding": (2, f"{_FSDP2} --torch-fsdp2-no-reshard-after-forward"),
    "FSDP2, activations checkpointed": (2, f"{_FSDP2} {_RECOMPUTE} 1 --recompute-method uniform"),
    "TP2 FSDP2": (4, f"--tensor-model-parallel-size 2 {_FSDP2}"),
    "TP2 SP FSDP2": (4, f"{TP2_SP} {_FSDP2}"),
    "CP2 FSDP2": (2, f"{_CP2} p2p {_FSDP2}"),
    "CP2 DP2 FSDP2": (4, f"{_CP2} all_gather {_FSDP2}"),
    "FSDP2, compiled": (2, f"{_FSDP2} --torch-compile"),
    "FSDP2 in host memory": (2, f"{_FSDP2} --torch-fsdp2-cpu-offload"),
    "TP2 SP FSDP2 in host memory": (4, f"{TP2_SP} {_FSDP2} --torch-fsdp2-cpu-offload"),
    "PP2 FSDP2": (4, f"{_PP2} {_FSDP2}"),
    "PP2 VPP2 FSDP2": (4, f"{_PP2_VPP2} {_FSDP2}"),
    "PP2 gpipe FSDP2": (4, f"{_PP2} {_BY} gpipe {_FSDP2}"),
    "PP2 VPP2 looped-bfs FSDP2": (4, f"{_PP2_VPP2} {_BY} looped-bfs {_FSDP2}"),
    "TP2 SP PP2 FSDP2": (8, f"{TP2_SP} {_PP2} {_FSDP2}"),
    "CP2 PP2 VPP2 FSDP2": (4, f"{_CP2} p2p {_PP2_VPP2} {_FSDP2}"),
    "PP2 VPP2 FSDP2, activations checkpointed": (4, f"{_PP2_VPP2} {_FSDP2} {_RECOMPUTE} 1 --recompute-method uniform"),
    "PP2 VPP2 FSDP2 without resharding": (4, f"{_PP2_VPP2} {_FSDP2} --torch-fsdp2-no-reshard-after-forward"),
    "HSDP 2 x 2, PP2 FSDP2": (8, f"{_PP2} {_FSDP2} {_TWO_COPIES}"),
    "Megatron-FSDP, nothing sharded": (2, f"{_MEGATRON_FSDP} no_shard"),
    "Megatron-FSDP, ZeRO-1": (2, f"{_MEGATRON_FSDP} optim"),
    "ZeRO-2": (2, f"{_MEGATRON_FSDP} optim_grads"),
    "ZeRO-2 on 4": (4, f"{_MEGATRON_FSDP} optim_grads"),
    "ZeRO-3": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "ZeRO-3 on 4": (4, f"{_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP ZeRO-2": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads"),
    "TP2 SP ZeRO-3": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "CP2 ZeRO-3": (2, f"{_CP2} p2p {_MEGATRON_FSDP} optim_grads_params"),
    "CP2 DP2 ZeRO-2": (4, f"{_CP2} all_gather {_MEGATRON_FSDP} optim_grads"),
    "ZeRO-3, activations checkpointed": (
        2,
        f"{_MEGATRON_FSDP} optim_grads_params {_RECOMPUTE} 1 --recompute-method uniform",
    ),
    "ZeRO-3, parts recomputed": (
        2,
        f"{_MEGATRON_FSDP} optim_grads_params --recompute-granularity selective "
        "--recompute-modules core_attn mlp layernorm",
    ),
    "ZeRO-3, compiled": (2, f"{_MEGATRON_FSDP} optim_grads_params --torch-compile"),
    "HSDP 2 x 2, ZeRO-2": (4, f"{_MEGATRON_FSDP} optim_grads {_TWO_COPIES}"),
    "HSDP 2 x 2, ZeRO-3": (4, f"{_MEGATRON_FSDP} optim_grads_params {_TWO_COPIES}"),
    "HSDP 2 x 2, ZeRO-3, optimizer state divided over all": (
        4,
        f"{_MEGATRON_FSDP} optim_grads_params {_TWO_COPIES} --outer-dp-sharding-strategy optim",
    ),
    "DP4 distributed optimizer, overlap": (4, _OVERLAP),
    "HSDP 2 x 2, FSDP2": (4, f"{_FSDP2} {_TWO_COPIES}"),
    "HSDP 2 x 2, distributed optimizer": (4, f"--use-distributed-optimizer {_TWO_COPIES}"),
    "HSDP 2 x 2, distributed optimizer, overlap": (4, f"{_OVERLAP} {_TWO_COPIES}"),
    "DP2 distributed optimizer, half of it in host memory": (
        2,
        "--use-distributed-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    ),
}
CONTEXT = {
    "CP2 p2p, tied": (2, f"{_CP2} p2p"),
    "CP2 p2p, untied": (2, f"{_CP2} p2p"),
    "CP2 all_gather, tied": (2, f"{_CP2} all_gather"),
    "CP2 all_gather, untied": (2, f"{_CP2} all_gather"),
    "CP2 a2a, tied": (2, f"{_CP2} a2a"),
    "CP2 a2a, untied": (2, f"{_CP2} a2a"),
    "CP2, another exchange in each layer, tied": (2, f"{_CP2} p2p all_gather a2a allgather"),
    "CP4 p2p, tied": (4, f"{_CP4} p2p"),
    "CP4 p2p, untied": (4, f"{_CP4} p2p"),
    "CP4 all_gather, untied": (4, f"{_CP4} all_gather"),
    # Four heads of keys: the other models have two.
    "CP4 a2a, learned positions, biases": (4, f"{_CP4} a2a"),
    "CP4 p2p, learned positions, biases": (4, f"{_CP4} p2p"),
    "TP4 SP, tied": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "TP4 SP, untied": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "TP2 CP2 PP2 p2p, untied": (8, f"--tensor-model-parallel-size 2 {_CP2} p2p --pipeline-model-parallel-size 2"),
    "TP2 SP CP2 PP2 p2p, untied": (8, f"{TP2_SP} {_CP2} p2p --pipeline-model-parallel-size 2"),
    "TP2 SP CP2 PP2 all_gather, tied": (8, f"{TP2_SP} {_CP2} all_gather --pipeline-model-parallel-size 2"),
    "TP2 SP CP2 PP2 a2a, learned positions, biases": (8, f"{TP2_SP} {_CP2} a2a --pipeline-model-parallel-size 2"),
    "TP2 SP CP4 all_gather, query and key norm, QKV bias": (8, f"{TP2_SP} {_CP4} all_gather"),
    "CP2 PP2 VPP2 all_gather, untied": (4, f"{_CP2} all_gather {_PP2_VPP2}"),
    "CP2 DP2 p2p distributed optimizer, overlap, tied": (4, f"{_CP2} p2p {_OVERLAP}"),
    "CP2 DP2 all_gather distributed optimizer, untied": (4, f"{_CP2} all_gather --use-distributed-optimizer"),
    "DP2, packed": (2, ""),
    "TP2 SP, packed": (2, TP2_SP),
    "PP4, packed": (4, "--pipeline-model-parallel-size 4"),
    "PP2 VPP2, packed, learned positions": (2, _PP2_VPP2),
    "CP2 all_gather, packed": (2, f"{_CP2} all_gather"),
    "CP4 all_gather, packed, learned positions": (4, f"{_CP4} all_gather"),
    "CP2 a2a, packed": (2, f"{_CP2} a2a"),
    "TP2 SP CP2 PP2 all_gather, packed": (8, f"{TP2_SP} {_CP2} all_gather --pipeline-model-parallel-size 2"),
}
"""Samples divided over ranks, or into documents: layout and model, ranks, flags."""

# Of the uneven and the divided, what is part of every test run.
QUICK = {
    "CP2 a2a, untied",
    "CP4 p2p, untied",
    "CP2 DP2 all_gather distributed optimizer, untied",
    "CP2 all_gather, packed",
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

# Mixtures of experts. Which experts a token gets is no continuous function: two logits closer than the rounding may
# change places between layouts, and the losses part. In the 20 steps of this model the k-th and the next logit are
# never that close (docs/decisions.md has the gaps).
_EP2 = "--expert-model-parallel-size 2"
_ALLTOALL = "--moe-token-dispatcher-type alltoall"
EXPERT_LAYOUTS = {
    "EP2": (2, _EP2),
    "EP2, alltoall": (2, f"{_EP2} {_ALLTOALL}"),
    "EP4": (4, "--expert-model-parallel-size 4"),
    "EP4, alltoall": (4, f"--expert-model-parallel-size 4 {_ALLTOALL}"),
    "EP2, expert DP2, distributed optimizer, overlap, alltoall": (4, f"{_EP2} {_OVERLAP} {_ALLTOALL}"),
    "TP2 SP EP1": (2, TP2_SP),
    "TP2 SP, whole experts on every rank": (2, f"{TP2_SP} --expert-tensor-parallel-size 1 {_ALLTOALL}"),
    "TP2 SP EP2 on the same ranks": (2, f"{TP2_SP} {_EP2} --expert-tensor-parallel-size 1 {_ALLTOALL}"),
    "TP2 SP EP2, tensor-parallel experts": (4, f"{TP2_SP} {_EP2}"),
    "TP2 SP EP2, tensor-parallel experts, alltoall": (4, f"{TP2_SP} {_EP2} {_ALLTOALL}"),
    "CP2 EP2 on the same ranks, alltoall": (2, f"--context-parallel-size 2 {_EP2} {_ALLTOALL}"),
    "TP2 SP CP2 EP2, distributed optimizer": (
        4,
        f"{TP2_SP} --context-parallel-size 2 {_EP2} --use-distributed-optimizer",
    ),
    "EP2 ZeRO-3": (2, f"{_EP2} {_MEGATRON_FSDP} optim_grads_params"),
    "EP2, expert DP2, ZeRO-2, alltoall": (4, f"{_EP2} {_MEGATRON_FSDP} optim_grads {_ALLTOALL}"),
    "TP2 SP EP2, ZeRO-3": (4, f"{TP2_SP} {_EP2} {_MEGATRON_FSDP} optim_grads_params"),
    "EP2, HSDP 2 x 2, distributed optimizer, overlap": (4, f"{_EP2} {_OVERLAP} {_TWO_COPIES}"),
    "EP2, HSDP 2 x 2, ZeRO-3, alltoall": (4, f"{_EP2} {_MEGATRON_FSDP} optim_grads_params {_TWO_COPIES} {_ALLTOALL}"),
    "EP2 PP2 DP2": (4, f"{_EP2} --pipeline-model-parallel-size 2 {_ALLTOALL}"),
    "EP2 PP2 DP4, expert DP2, distributed optimizer": (
        8,
        f"{_EP2} --pipeline-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "TP2 SP PP2 VPP2 DP2 EP2, expert DP2, distributed optimizer, alltoall": (
        8,
        f"{TP2_SP} {_PP2_VPP2} {_EP2} --expert-tensor-parallel-size 1 {_OVERLAP} {_ALLTOALL}",
    ),
}
QUICK_EXPERTS = {"EP2 PP2 DP2"}

# Experts chosen by scores with a bias, which every step moves by the load of the global batch, from groups of them.
ROUTING = {
    "EP2": (2, f"{_EP2} {_ALLTOALL}"),
    "EP4": (4, "--expert-model-parallel-size 4"),
    "TP2 SP EP2, tensor-parallel experts": (4, f"{TP2_SP} {_EP2}"),
    "CP2 EP2 on the same ranks": (2, f"--context-parallel-size 2 {_EP2} {_ALLTOALL}"),
    "EP2 PP2 VPP2": (4, f"{_PP2_VPP2} {_EP2} {_ALLTOALL}"),
    "EP2 ZeRO-3": (2, f"{_EP2} {_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP EP2 on the same ranks": (2, f"{TP2_SP} {_EP2} --expert-tensor-parallel-size 1 {_ALLTOALL}"),
    "DP2 distributed optimizer, overlap": (2, _OVERLAP),
    "one process, recompute full uniform": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
}
TWICE = [*ROUTING][:6]  # what divides tokens or layers, over which the losses are added up

QUICK_ROUTING = {"TP2 SP EP2, tensor-parallel experts"}

# Norms after attention and MLP, and norms of queries and keys over the heads of all ranks. At TP4 two ranks share each
# of the two key heads.
OLMO2 = {
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP4": (4, "--tensor-model-parallel-size 4"),
    "TP2 SP PP2 VPP2": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p": (2, f"{_CP2} p2p"),
    "DP2 distributed optimizer, overlap": (2, _OVERLAP),
    "TP2 SP FSDP2": (4, f"{TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
    "one process, recompute selective": (1, "--recompute-granularity selective --recompute-modules core_attn mlp"),
}
QUICK_OLMO2 = {"TP4"}

# Windows of 16 positions in some layers; a window ends in another rank's chunk, in another document, or in none.
WINDOWS = {
    "TP2 SP PP2 VPP2, windows": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, windows": (2, f"{_CP2} all_gather"),
    "CP2 a2a, windows": (2, f"{_CP2} a2a"),
    "DP2 FSDP2, windows": (2, _FSDP2),
    "one process, recompute selective, windows": (1, "--recompute-granularity selective"),
    "CP2 all_gather, windows, packed": (2, f"{_CP2} all_gather"),
}
QUICK_WINDOWS = {"CP2 all_gather, windows", "CP2 all_gather, windows, packed"}

# Latent attention, with and without latents of queries: whole down projections, and a part of the key that all heads
# of all ranks share.
LATENTS = {
    "TP2, latents": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP, latents": (2, TP2_SP),
    "TP2, latents of keys alone": (2, "--tensor-model-parallel-size 2"),
    "TP4 SP, latents of keys alone": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "TP2 SP PP2 VPP2, latents": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP2 SP CP2 PP2 all_gather, latents": (8, f"{TP2_SP} {_CP2} all_gather --pipeline-model-parallel-size 2"),
    "CP2 p2p, latents": (2, f"{_CP2} p2p"),
    "CP2 all_gather, latents": (2, f"{_CP2} all_gather"),
    "CP2 a2a, latents": (2, f"{_CP2} a2a"),
    "DP2 distributed optimizer, overlap, latents": (2, _OVERLAP),
    "TP2 SP FSDP2, latents": (4, f"{TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3, latents": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform, latents": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
    "one process, recompute selective, latents": (
        1,
        "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "TP2 SP PP2 VPP2, latents and learned positions": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, latents and learned positions": (2, f"{_CP2} p2p"),
    "TP2 SP, latents, packed": (2, TP2_SP),
    "CP2 all_gather, latents, packed": (2, f"{_CP2} all_gather"),
}
QUICK_LATENTS = {"TP2, latents", "TP2 SP CP2 PP2 all_gather, latents", "TP4 SP, latents of keys alone"}

# Keys that an indexer chooses, which every rank has whole and which learns from the heads of all ranks.
INDEXED = {
    "TP2, chosen keys": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP PP2 VPP2, chosen keys": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, chosen keys": (2, f"{_CP2} all_gather"),
    "DP2 distributed optimizer, overlap, chosen keys": (2, _OVERLAP),
    "TP2 SP FSDP2, chosen keys": (4, f"{TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3, chosen keys": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform, chosen keys": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
    "one process, recompute selective, chosen keys": (1, "--recompute-granularity selective"),
    "TP2 SP CP2 all_gather, chosen keys, packed": (4, f"{TP2_SP} {_CP2} all_gather"),
    "TP2 SP, a token ahead by chosen keys": (2, TP2_SP),
}
QUICK_INDEXED = {"TP2 SP PP2 VPP2, chosen keys", "TP2 SP CP2 all_gather, chosen keys, packed"}

# Gated delta rules: heads, states and inputs of the convolution of other ranks; documents within and across ranks.
DELTA = {
    "TP2 SP PP2 VPP2, delta rules": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP2 SP PP2 VPP2, delta rules with LayerNorm": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP4 p2p, delta rules": (4, f"{_CP4} p2p"),
    "DP2 distributed optimizer, overlap, delta rules": (2, _OVERLAP),
    "TP2 SP FSDP2, delta rules": (4, f"{TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3, delta rules": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "CP2 p2p, recompute selective, delta rules": (
        2,
        f"{_CP2} p2p --recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "CP4 all_gather, delta rules, packed": (4, f"{_CP4} all_gather"),
    "TP2 SP EP2, Qwen3-Next": (4, f"{TP2_SP} {_EP2}"),
    "TP2 SP PP2 VPP2, Kimi delta rules": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP2 CP2 all_gather, Kimi delta rules": (4, f"--tensor-model-parallel-size 2 {_CP2} all_gather"),
    "TP2 SP FSDP2, Kimi delta rules": (4, f"{TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3, Kimi delta rules": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "CP2 p2p, recompute selective, Kimi delta rules": (
        2,
        f"{_CP2} p2p --recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "CP4 all_gather, Kimi delta rules, packed": (4, f"{_CP4} all_gather"),
    "TP2 SP EP2, Kimi Linear": (4, f"{TP2_SP} {_EP2}"),
    "TP2 SP PP2 VPP2, OLMo hybrid": (4, f"{TP2_SP} {_PP2_VPP2}"),
}
QUICK_DELTA = {
    "CP4 all_gather, delta rules, packed",
    "TP2 SP PP2 VPP2, delta rules",
    "TP2 SP PP2 VPP2, Kimi delta rules",
}

# Mamba-2, and layers of one thing alone.
MAMBA = {
    "TP2 SP PP2 VPP2, Mamba-2 hybrid": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, Mamba-2 hybrid": (4, "--tensor-model-parallel-size 4"),
    "CP4 p2p, Mamba-2 hybrid": (4, f"{_CP4} p2p"),
    "DP2 distributed optimizer, overlap, Mamba-2 hybrid": (2, _OVERLAP),
    "TP2 SP FSDP2, Mamba-2 hybrid": (4, f"{TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3, Mamba-2 hybrid": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "CP2 p2p, recompute selective, Mamba-2 hybrid": (
        2,
        f"{_CP2} p2p --recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "CP4 all_gather, Mamba-2 hybrid, packed": (4, f"{_CP4} all_gather"),
    "TP2 SP EP2, Mamba-2 hybrid with experts": (4, f"{TP2_SP} {_EP2}"),
    "TP2 SP PP2 VPP2, Falcon-H1": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, Falcon-H1": (4, "--tensor-model-parallel-size 4"),
    "CP4 p2p, Falcon-H1": (4, f"{_CP4} p2p"),
    "CP2 a2a, recompute selective, Falcon-H1": (2, f"{_CP2} a2a --recompute-granularity selective"),
    "DP2 distributed optimizer, overlap, Falcon-H1": (2, _OVERLAP),
    "TP2 SP FSDP2, Falcon-H1": (4, f"{TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3, Falcon-H1": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "CP4 all_gather, Falcon-H1, packed": (4, f"{_CP4} all_gather"),
}
QUICK_MAMBA = {
    *("CP4 all_gather, Mamba-2 hybrid, packed", "TP2 SP PP2 VPP2, Mamba-2 hybrid", "TP2 SP PP2 VPP2, Falcon-H1"),
}

# Multi-token prediction: the last stage has word embeddings, and labels come from another rank's chunk of a sample.
AHEAD = {
    "TP2, one token ahead": (2, "--tensor-model-parallel-size 2"),
    "PP2 VPP2, two tokens ahead": (2, _PP2_VPP2),
    "PP3, 1, 2 and 1 layers, two tokens ahead": (3, UNEVEN["PP3, 1, 2 and 1 layers"][1]),
    "TP2 SP PP2 VPP2, one token ahead": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP2 SP CP2 PP2 all_gather, two tokens ahead": (8, f"{TP2_SP} {_CP2} all_gather {_PP2}"),
    "CP4 p2p, two tokens ahead": (4, f"{_CP4} p2p"),
    "CP2 a2a, two tokens ahead": (2, f"{_CP2} a2a"),
    "PP2 FSDP2, one token ahead": (4, f"{_PP2} {_FSDP2}"),
    "PP2 DP2 distributed optimizer, overlap, two tokens ahead, packed": (4, f"{_PP2} {_OVERLAP}"),
    "CP2 all_gather, two tokens ahead, packed": (2, f"{_CP2} all_gather"),
    "TP2 SP FSDP2, one token ahead": (4, f"{TP2_SP} {_FSDP2}"),
    "ZeRO-2, one token ahead": (2, f"{_MEGATRON_FSDP} optim_grads"),
    "TP2 SP ZeRO-3, two tokens ahead": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP EP2, a token ahead by latents and experts": (4, f"{TP2_SP} {_EP2}"),
    "PP2 EP2, a token ahead by latents and experts": (4, f"{_PP2} {_EP2} {_ALLTOALL}"),
    "PP2, Et*4|mL, one token ahead": (2, f"{_PP2} {_SPLIT} Et*4|mL"),
    "PP2 VPP2 DP2 distributed optimizer, overlap, Et|t*2|t|mmL, two tokens ahead": (
        4,
        f"{_PP2} {_SPLIT} Et|t*2|t|mmL {_OVERLAP}",
    ),
    "PP4 interleaved-zero-bubble, Et|t*2|t|mL, one token ahead": (
        4,
        f"--pipeline-model-parallel-size 4 {_SPLIT} Et|t*2|t|mL {_BY} interleaved-zero-bubble",
    ),
    "TP2 SP PP2 zbv FSDP2, Et*2|t|t|mL, one token ahead": (
        8,
        f"{TP2_SP} {_PP2} {_SPLIT} Et*2|t|t|mL {_BY} zbv {_FSDP2}",
    ),
    "PP2 EP2, Et*4|mL, a token ahead by latents and experts": (4, f"{_PP2} {_SPLIT} Et*4|mL {_EP2} {_ALLTOALL}"),
    "one process, recompute full uniform, two tokens ahead": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
    "one process, recompute selective, two tokens ahead": (1, "--recompute-granularity selective"),
}
QUICK_AHEAD = {
    "PP2, Et*4|mL, one token ahead",
    "TP2 SP PP2 VPP2, one token ahead",
    "CP2 all_gather, two tokens ahead, packed",
}

# What an update divides: rows, columns, layers, and state in flat ranges or rows.
UPDATES = ("TP2 SP", "PP2 VPP2", "DP2 distributed optimizer, overlap", "TP2 SP FSDP2", "ZeRO-3")
QUICK_UPDATES = {"TP2 SP FSDP2"}

RECOMPUTE = {
    "full uniform": f"{_RECOMPUTE} 1 --recompute-method uniform",
    "full uniform by twos": f"{_RECOMPUTE} 2 --recompute-method uniform",
    "full block": f"{_RECOMPUTE} 1 --recompute-method block",
    "selective": "--recompute-granularity selective",
    "selective, all parts": "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
}

# Pieces that no other model has, each in layouts that might take it for the usual one.
PIECES = {
    "TP2 SP PP2 VPP2, interleaved half rotation, none in layer 2": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, interleaved half rotation, none in layer 2": (2, f"{_CP2} p2p"),
    "TP2 SP PP2 EP2, experts in two layers": (
        4,
        f"{TP2_SP} --pipeline-model-parallel-size 2 {_EP2} {_ALLTOALL} --expert-tensor-parallel-size 1",
    ),
    "PP2, 1 and 3 layers, experts in two layers": (
        2,
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    ),
    "EP2, experts with biases": (2, _EP2),
    "TP2 SP PP2 VPP2 EP2, experts with biases": (
        4,
        f"{TP2_SP} {_PP2_VPP2} {_EP2} {_ALLTOALL} --expert-tensor-parallel-size 1",
    ),
    "TP2 SP, tensor-parallel experts, experts with biases": (2, TP2_SP),
    "TP2 SP EP2, tensor-parallel experts, alltoall, experts with biases": (4, f"{TP2_SP} {_EP2} {_ALLTOALL}"),
    "CP2 EP2 all_gather, experts with biases": (2, f"{_CP2} all_gather {_EP2} {_ALLTOALL}"),
    "EP2 ZeRO-3, experts with biases": (2, f"{_EP2} {_MEGATRON_FSDP} optim_grads_params"),
    "EP2, expert DP2, distributed optimizer, overlap, experts with biases": (4, f"{_EP2} {_OVERLAP} {_ALLTOALL}"),
    "one process, recompute full uniform, experts with biases": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
    "TP2 SP PP2 VPP2 EP2, sparsely mixed experts": (4, f"{TP2_SP} {_PP2_VPP2} {_EP2} --expert-tensor-parallel-size 1"),
    "EP2, experts with a capacity": (2, _EP2),
    "TP2 SP PP2 VPP2 EP2, experts with a capacity": (
        4,
        f"{TP2_SP} {_PP2_VPP2} {_EP2} {_ALLTOALL} --expert-tensor-parallel-size 1",
    ),
    "TP4 SP, experts with a capacity": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "CP2 EP2, experts with a capacity": (2, f"{_CP2} p2p {_EP2} {_ALLTOALL}"),
    "EP2 ZeRO-3, experts with a capacity": (2, f"{_EP2} {_MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform, experts with a capacity": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
    "TP4 SP, query and key norm after rotation": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "CP2 a2a, query and key norm after rotation": (2, f"{_CP2} a2a"),
    "TP2 SP PP2 VPP2, sinks and gates": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, sinks and gates": (4, "--tensor-model-parallel-size 4"),
    "CP2 p2p, sinks and gates": (2, f"{_CP2} p2p"),
    "CP2 a2a, sinks and gates": (2, f"{_CP2} a2a"),
    "TP2 SP FSDP2, sinks and gates": (4, f"{TP2_SP} {_FSDP2}"),
    "ZeRO-3, sinks and gates": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "DP2 distributed optimizer, overlap, sinks and gates": (2, _OVERLAP),
    "TP2 SP PP2 VPP2, gates of heads": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, gates of heads": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, gates of heads": (2, f"{_CP2} a2a"),
    "TP2 SP FSDP2, gates of heads": (4, f"{TP2_SP} {_FSDP2}"),
    "TP2 SP PP2 VPP2, loss of the normalizer": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 a2a, loss of the normalizer": (2, f"{_CP2} a2a"),
    "TP2 SP FSDP2, loss of the normalizer": (4, f"{TP2_SP} {_FSDP2}"),
    "one process, recompute selective, sinks and gates": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, caps and clips": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, caps and clips": (2, f"{_CP2} all_gather"),
    "TP2 SP PP2 VPP2, rotation by layer": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, rotation by layer": (2, f"{_CP2} all_gather"),
    "DP2 FSDP2, rotation by layer": (2, _FSDP2),
    "TP2 SP PP2 VPP2, heads by layer": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, heads by layer": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, heads by layer": (2, f"{_CP2} a2a"),
    "CP2 all_gather, heads by layer, packed": (2, f"{_CP2} all_gather"),
    "CP2 p2p, longrope": (2, f"{_CP2} p2p"),
    "TP2 SP PP2 VPP2, longrope": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP2 SP PP2 VPP2, temperature": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, temperature": (2, f"{_CP2} p2p"),
    "CP2 a2a, temperature": (2, f"{_CP2} a2a"),
    "CP2 all_gather, temperature, packed": (2, f"{_CP2} all_gather"),
    "TP2, xIELU": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP PP2 VPP2, xIELU": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, xIELU": (4, "--tensor-model-parallel-size 4"),
    "CP2 p2p, xIELU": (2, f"{_CP2} p2p"),
    "TP2 SP FSDP2, xIELU": (4, f"{TP2_SP} {_FSDP2}"),
    "ZeRO-3, xIELU": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "DP2 distributed optimizer, overlap, xIELU": (2, _OVERLAP),
    "one process, recompute selective, xIELU": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, bounded quick GeGLU": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "ZeRO-3, bounded quick GeGLU": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute selective, bounded quick GeGLU": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, ALiBi": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, ALiBi": (2, f"{_CP2} p2p"),
    "CP2 a2a, ALiBi": (2, f"{_CP2} a2a"),
    "CP2 all_gather, packed ALiBi": (2, f"{_CP2} all_gather"),
    "TP2 SP PP2 VPP2, LayerNorm without bias": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP2 SP PP2 VPP2, some biases": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "one process, recompute selective, some biases": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, GeGLU and multipliers": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, GeGLU and multipliers": (2, f"{_CP2} p2p"),
    "one process, recompute selective, GeGLU and multipliers": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, Command R": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, Command R": (4, "--tensor-model-parallel-size 4"),
    "TP2 SP PP2 VPP2, Command R Plus": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, Command R Plus": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, Command R Plus": (2, f"{_CP2} a2a"),
    "TP2 SP FSDP2, Command R Plus": (4, f"{TP2_SP} {_FSDP2}"),
    "CP2 p2p, Command R": (2, f"{_CP2} p2p"),
    "TP2 SP FSDP2, Command R": (4, f"{TP2_SP} {_FSDP2}"),
    "TP2, recompute selective, Command R": (2, f"--tensor-model-parallel-size 2 {RECOMPUTE['selective, all parts']}"),
    "TP2 SP PP2 VPP2, Phi": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, Phi": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, Phi": (2, f"{_CP2} a2a"),
    "TP2 SP FSDP2, Phi": (4, f"{TP2_SP} {_FSDP2}"),
    "ZeRO-3, Phi": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP PP2 VPP2, GPT-NeoX": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "TP4, GPT-NeoX": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, GPT-NeoX": (2, f"{_CP2} a2a"),
    "TP2 SP ZeRO-3, GPT-NeoX": (4, f"{TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP, recompute selective, GPT-NeoX": (2, f"{TP2_SP} {RECOMPUTE['selective, all parts']}"),
    "TP2 SP PP2 VPP2, Command R7B": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, Command R7B": (2, f"{_CP2} all_gather"),
    "TP2 SP PP2 VPP2, clipped products": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, clipped products": (2, f"{_CP2} p2p"),
    "CP2 a2a, clipped products": (2, f"{_CP2} a2a"),
    "TP2 SP FSDP2, clipped products": (4, f"{TP2_SP} {_FSDP2}"),
    "ZeRO-3, clipped products": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP PP2 VPP2, clipped latents": (4, f"{TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, clipped latents": (2, f"{_CP2} all_gather"),
    "DP2 distributed optimizer, overlap, clipped products by Adam": (2, _OVERLAP),
    "CP2 all_gather, clipped products by Adam": (2, f"{_CP2} all_gather"),
    "one process, recompute selective, clipped products by Adam": (1, RECOMPUTE["selective, all parts"]),
}
_ZBV = f"{_PP2_VPP2} {_BY} zbv"
# Orders of a pipeline's passes that are run as tables, most of them with backward passes in two halves.
SCHEDULES = {
    "PP2 VPP2 looped-bfs, tied": (2, f"{_PP2_VPP2} {_BY} looped-bfs"),
    "PP4 interleaved-zero-bubble, tied": (4, f"--pipeline-model-parallel-size 4 {_BY} interleaved-zero-bubble"),
    "PP2 VPP2 interleaved-zero-bubble, untied": (2, f"{_PP2_VPP2} {_BY} interleaved-zero-bubble"),
    "PP2 zbv, untied": (2, _ZBV),
    "PP2 dualpipe-v, tied": (2, f"{_PP2_VPP2} {_BY} dualpipe-v"),
    "TP2 SP PP2 zbv, tied": (4, f"{TP2_SP} {_ZBV}"),
    "CP2 PP2 dualpipe-v all_gather, packed": (4, f"{_CP2} all_gather {_PP2_VPP2} {_BY} dualpipe-v"),
    "EP2 PP2 zbv, alltoall, experts": (4, f"{_EP2} {_ZBV} {_ALLTOALL}"),
    "PP2 zbv DP2 distributed optimizer, overlap, tied": (4, f"{_ZBV} {_OVERLAP}"),
    "PP2 zbv, Ett|t|t|L, tied": (2, f"{_PP2} --pipeline-model-parallel-layout Et*2|(t|)*2L {_BY} zbv"),
    "PP4 interleaved-zero-bubble FSDP2, tied": (
        8,
        f"--pipeline-model-parallel-size 4 {_BY} interleaved-zero-bubble {_FSDP2}",
    ),
    "PP2 VPP2 interleaved-zero-bubble FSDP2, untied": (4, f"{_PP2_VPP2} {_BY} interleaved-zero-bubble {_FSDP2}"),
    "PP2 zbv FSDP2, tied": (4, f"{_ZBV} {_FSDP2}"),
    "PP2 dualpipe-v FSDP2, untied": (4, f"{_PP2_VPP2} {_BY} dualpipe-v {_FSDP2} --micro-batch-size 1"),
    "TP2 SP PP2 zbv FSDP2, untied": (8, f"{TP2_SP} {_ZBV} {_FSDP2}"),
    "CP2 PP2 dualpipe-v FSDP2, packed": (4, f"{_CP2} all_gather {_PP2_VPP2} {_BY} dualpipe-v {_FSDP2}"),
    "HSDP 2 x 2, PP2 zbv FSDP2, tied": (8, f"{_ZBV} {_FSDP2} {_TWO_COPIES}"),
    "PP2 zbv FSDP2, activations checkpointed, untied": (
        4,
        f"{_ZBV} {_FSDP2} {_RECOMPUTE} 1 --recompute-method uniform",
    ),
    "PP2 zbv FSDP2, Ett|t|t|L, tied": (
        4,
        f"{_PP2} --pipeline-model-parallel-layout Et*2|(t|)*2L {_BY} zbv {_FSDP2}",
    ),
    "PP2 zbv FSDP2, one token ahead": (4, f"{_ZBV} {_FSDP2}"),
}
QUICK_SCHEDULES = {"PP2 VPP2 looped-bfs, tied", "PP2 VPP2 interleaved-zero-bubble, untied", "TP2 SP PP2 zbv, tied"}
QUICK_SCHEDULES |= {"PP2 zbv FSDP2, tied"}
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
