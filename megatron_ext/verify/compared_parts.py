"""Lists the layouts in which kinds of parts are compared with one process: name -> (ranks, flags). The name ends with
the model, a key of `compared_models.MODELS`, or is that of the layout alone."""

from megatron_ext.verify.compared_layouts import (
    ALLTOALL,
    BY,
    CP2,
    CP4,
    EP2,
    FSDP2,
    MEGATRON_FSDP,
    OVERLAP,
    PP2,
    PP2_VPP2,
    RECOMPUTE,
    RECOMPUTED,
    SPLIT,
    TP2_SP,
    TWO_COPIES,
    UNEVEN,
)

EXPERT_LAYOUTS = {
    "EP2": (2, EP2),
    "EP2, alltoall": (2, f"{EP2} {ALLTOALL}"),
    "EP4": (4, "--expert-model-parallel-size 4"),
    "EP4, alltoall": (4, f"--expert-model-parallel-size 4 {ALLTOALL}"),
    "EP2, expert DP2, distributed optimizer, overlap, alltoall": (4, f"{EP2} {OVERLAP} {ALLTOALL}"),
    "TP2 SP EP1": (2, TP2_SP),
    "TP2 SP, whole experts on every rank": (2, f"{TP2_SP} --expert-tensor-parallel-size 1 {ALLTOALL}"),
    "TP2 SP EP2 on the same ranks": (2, f"{TP2_SP} {EP2} --expert-tensor-parallel-size 1 {ALLTOALL}"),
    "TP2 SP EP2, tensor-parallel experts": (4, f"{TP2_SP} {EP2}"),
    "TP2 SP EP2, tensor-parallel experts, alltoall": (4, f"{TP2_SP} {EP2} {ALLTOALL}"),
    "CP2 EP2 on the same ranks, alltoall": (2, f"--context-parallel-size 2 {EP2} {ALLTOALL}"),
    "TP2 SP CP2 EP2, distributed optimizer": (
        4,
        f"{TP2_SP} --context-parallel-size 2 {EP2} --use-distributed-optimizer",
    ),
    "EP2 ZeRO-3": (2, f"{EP2} {MEGATRON_FSDP} optim_grads_params"),
    "EP2, expert DP2, ZeRO-2, alltoall": (4, f"{EP2} {MEGATRON_FSDP} optim_grads {ALLTOALL}"),
    "TP2 SP EP2, ZeRO-3": (4, f"{TP2_SP} {EP2} {MEGATRON_FSDP} optim_grads_params"),
    "EP2, HSDP 2 x 2, distributed optimizer, overlap": (4, f"{EP2} {OVERLAP} {TWO_COPIES}"),
    "EP2, HSDP 2 x 2, ZeRO-3, alltoall": (4, f"{EP2} {MEGATRON_FSDP} optim_grads_params {TWO_COPIES} {ALLTOALL}"),
    "EP2 PP2 DP2": (4, f"{EP2} --pipeline-model-parallel-size 2 {ALLTOALL}"),
    "EP2 PP2 DP4, expert DP2, distributed optimizer": (
        8,
        f"{EP2} --pipeline-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "TP2 SP PP2 VPP2 DP2 EP2, expert DP2, distributed optimizer, alltoall": (
        8,
        f"{TP2_SP} {PP2_VPP2} {EP2} --expert-tensor-parallel-size 1 {OVERLAP} {ALLTOALL}",
    ),
}
QUICK_EXPERTS = {"EP2 PP2 DP2"}

# Experts chosen by scores with a bias, which every step moves by the load of the global batch, from groups of them.
ROUTING = {
    "EP2": (2, f"{EP2} {ALLTOALL}"),
    "EP4": (4, "--expert-model-parallel-size 4"),
    "TP2 SP EP2, tensor-parallel experts": (4, f"{TP2_SP} {EP2}"),
    "CP2 EP2 on the same ranks": (2, f"--context-parallel-size 2 {EP2} {ALLTOALL}"),
    "EP2 PP2 VPP2": (4, f"{PP2_VPP2} {EP2} {ALLTOALL}"),
    "EP2 ZeRO-3": (2, f"{EP2} {MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP EP2 on the same ranks": (2, f"{TP2_SP} {EP2} --expert-tensor-parallel-size 1 {ALLTOALL}"),
    "DP2 distributed optimizer, overlap": (2, OVERLAP),
    "one process, recompute full uniform": (1, f"{RECOMPUTED} 1 --recompute-method uniform"),
}
TWICE = [*ROUTING][:6]  # what divides tokens or layers, over which the losses are added up

QUICK_ROUTING = {"TP2 SP EP2, tensor-parallel experts"}

# Norms after attention and MLP, and norms of queries and keys over the heads of all ranks. At TP4 two ranks share each
# of the two key heads.
OLMO2 = {
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP4": (4, "--tensor-model-parallel-size 4"),
    "TP2 SP PP2 VPP2": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 p2p": (2, f"{CP2} p2p"),
    "DP2 distributed optimizer, overlap": (2, OVERLAP),
    "TP2 SP FSDP2": (4, f"{TP2_SP} {FSDP2}"),
    "TP2 SP ZeRO-3": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform": (1, f"{RECOMPUTED} 1 --recompute-method uniform"),
    "one process, recompute selective": (1, "--recompute-granularity selective --recompute-modules core_attn mlp"),
}
QUICK_OLMO2 = {"TP4"}

# Windows of 16 positions in some layers; a window ends in another rank's chunk, in another document, or in none.
WINDOWS = {
    "TP2 SP PP2 VPP2, windows": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 all_gather, windows": (2, f"{CP2} all_gather"),
    "CP2 a2a, windows": (2, f"{CP2} a2a"),
    "DP2 FSDP2, windows": (2, FSDP2),
    "one process, recompute selective, windows": (1, "--recompute-granularity selective"),
    "CP2 all_gather, windows, packed": (2, f"{CP2} all_gather"),
}
QUICK_WINDOWS = {"CP2 all_gather, windows", "CP2 all_gather, windows, packed"}

# Latent attention, with and without latents of queries: whole down projections, and a part of the key that all heads
# of all ranks share.
LATENTS = {
    "TP2, latents": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP, latents": (2, TP2_SP),
    "TP2, latents of keys alone": (2, "--tensor-model-parallel-size 2"),
    "TP4 SP, latents of keys alone": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "TP2 SP PP2 VPP2, latents": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP2 SP CP2 PP2 all_gather, latents": (8, f"{TP2_SP} {CP2} all_gather --pipeline-model-parallel-size 2"),
    "CP2 p2p, latents": (2, f"{CP2} p2p"),
    "CP2 all_gather, latents": (2, f"{CP2} all_gather"),
    "CP2 a2a, latents": (2, f"{CP2} a2a"),
    "DP2 distributed optimizer, overlap, latents": (2, OVERLAP),
    "TP2 SP FSDP2, latents": (4, f"{TP2_SP} {FSDP2}"),
    "TP2 SP ZeRO-3, latents": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform, latents": (1, f"{RECOMPUTED} 1 --recompute-method uniform"),
    "one process, recompute selective, latents": (
        1,
        "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "TP2 SP PP2 VPP2, latents and learned positions": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 p2p, latents and learned positions": (2, f"{CP2} p2p"),
    "TP2 SP, latents, packed": (2, TP2_SP),
    "CP2 all_gather, latents, packed": (2, f"{CP2} all_gather"),
}
QUICK_LATENTS = {"TP2, latents", "TP2 SP CP2 PP2 all_gather, latents", "TP4 SP, latents of keys alone"}

# Keys that an indexer chooses, which every rank has whole and which learns from the heads of all ranks.
INDEXED = {
    "TP2, chosen keys": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP PP2 VPP2, chosen keys": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 all_gather, chosen keys": (2, f"{CP2} all_gather"),
    "DP2 distributed optimizer, overlap, chosen keys": (2, OVERLAP),
    "TP2 SP FSDP2, chosen keys": (4, f"{TP2_SP} {FSDP2}"),
    "TP2 SP ZeRO-3, chosen keys": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform, chosen keys": (1, f"{RECOMPUTED} 1 --recompute-method uniform"),
    "one process, recompute selective, chosen keys": (1, "--recompute-granularity selective"),
    "TP2 SP CP2 all_gather, chosen keys, packed": (4, f"{TP2_SP} {CP2} all_gather"),
    "TP2 SP, a token ahead by chosen keys": (2, TP2_SP),
}
QUICK_INDEXED = {"TP2 SP PP2 VPP2, chosen keys", "TP2 SP CP2 all_gather, chosen keys, packed"}

# Gated delta rules: heads, states and inputs of the convolution of other ranks; documents within and across ranks.
DELTA = {
    "TP2 SP PP2 VPP2, delta rules": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP2 SP PP2 VPP2, delta rules with LayerNorm": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP4 p2p, delta rules": (4, f"{CP4} p2p"),
    "DP2 distributed optimizer, overlap, delta rules": (2, OVERLAP),
    "TP2 SP FSDP2, delta rules": (4, f"{TP2_SP} {FSDP2}"),
    "TP2 SP ZeRO-3, delta rules": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "CP2 p2p, recompute selective, delta rules": (
        2,
        f"{CP2} p2p --recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "CP4 all_gather, delta rules, packed": (4, f"{CP4} all_gather"),
    "TP2 SP EP2, Qwen3-Next": (4, f"{TP2_SP} {EP2}"),
    "TP2 SP PP2 VPP2, Kimi delta rules": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP2 CP2 all_gather, Kimi delta rules": (4, f"--tensor-model-parallel-size 2 {CP2} all_gather"),
    "TP2 SP FSDP2, Kimi delta rules": (4, f"{TP2_SP} {FSDP2}"),
    "TP2 SP ZeRO-3, Kimi delta rules": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "CP2 p2p, recompute selective, Kimi delta rules": (
        2,
        f"{CP2} p2p --recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "CP4 all_gather, Kimi delta rules, packed": (4, f"{CP4} all_gather"),
    "TP2 SP EP2, Kimi Linear": (4, f"{TP2_SP} {EP2}"),
    "TP2 SP PP2 VPP2, OLMo hybrid": (4, f"{TP2_SP} {PP2_VPP2}"),
}
QUICK_DELTA = {
    "CP4 all_gather, delta rules, packed",
    "TP2 SP PP2 VPP2, delta rules",
    "TP2 SP PP2 VPP2, Kimi delta rules",
}

# Mamba-2, and layers of one thing alone.
MAMBA = {
    "TP2 SP PP2 VPP2, Mamba-2 hybrid": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, Mamba-2 hybrid": (4, "--tensor-model-parallel-size 4"),
    "CP4 p2p, Mamba-2 hybrid": (4, f"{CP4} p2p"),
    "DP2 distributed optimizer, overlap, Mamba-2 hybrid": (2, OVERLAP),
    "TP2 SP FSDP2, Mamba-2 hybrid": (4, f"{TP2_SP} {FSDP2}"),
    "TP2 SP ZeRO-3, Mamba-2 hybrid": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "CP2 p2p, recompute selective, Mamba-2 hybrid": (
        2,
        f"{CP2} p2p --recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "CP4 all_gather, Mamba-2 hybrid, packed": (4, f"{CP4} all_gather"),
    "TP2 SP EP2, Mamba-2 hybrid with experts": (4, f"{TP2_SP} {EP2}"),
    "TP2 SP PP2 VPP2, Falcon-H1": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, Falcon-H1": (4, "--tensor-model-parallel-size 4"),
    "CP4 p2p, Falcon-H1": (4, f"{CP4} p2p"),
    "CP2 a2a, recompute selective, Falcon-H1": (2, f"{CP2} a2a --recompute-granularity selective"),
    "DP2 distributed optimizer, overlap, Falcon-H1": (2, OVERLAP),
    "TP2 SP FSDP2, Falcon-H1": (4, f"{TP2_SP} {FSDP2}"),
    "TP2 SP ZeRO-3, Falcon-H1": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "CP4 all_gather, Falcon-H1, packed": (4, f"{CP4} all_gather"),
}
QUICK_MAMBA = {
    *("CP4 all_gather, Mamba-2 hybrid, packed", "TP2 SP PP2 VPP2, Mamba-2 hybrid", "TP2 SP PP2 VPP2, Falcon-H1"),
}

# Multi-token prediction: the last stage has word embeddings, and labels come from another rank's chunk of a sample.
AHEAD = {
    "TP2, one token ahead": (2, "--tensor-model-parallel-size 2"),
    "PP2 VPP2, two tokens ahead": (2, PP2_VPP2),
    "PP3, 1, 2 and 1 layers, two tokens ahead": (3, UNEVEN["PP3, 1, 2 and 1 layers"][1]),
    "TP2 SP PP2 VPP2, one token ahead": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP2 SP CP2 PP2 all_gather, two tokens ahead": (8, f"{TP2_SP} {CP2} all_gather {PP2}"),
    "CP4 p2p, two tokens ahead": (4, f"{CP4} p2p"),
    "CP2 a2a, two tokens ahead": (2, f"{CP2} a2a"),
    "PP2 FSDP2, one token ahead": (4, f"{PP2} {FSDP2}"),
    "PP2 DP2 distributed optimizer, overlap, two tokens ahead, packed": (4, f"{PP2} {OVERLAP}"),
    "CP2 all_gather, two tokens ahead, packed": (2, f"{CP2} all_gather"),
    "TP2 SP FSDP2, one token ahead": (4, f"{TP2_SP} {FSDP2}"),
    "ZeRO-2, one token ahead": (2, f"{MEGATRON_FSDP} optim_grads"),
    "TP2 SP ZeRO-3, two tokens ahead": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP EP2, a token ahead by latents and experts": (4, f"{TP2_SP} {EP2}"),
    "PP2 EP2, a token ahead by latents and experts": (4, f"{PP2} {EP2} {ALLTOALL}"),
    "PP2, Et*4|mL, one token ahead": (2, f"{PP2} {SPLIT} Et*4|mL"),
    "PP2 VPP2 DP2 distributed optimizer, overlap, Et|t*2|t|mmL, two tokens ahead": (
        4,
        f"{PP2} {SPLIT} Et|t*2|t|mmL {OVERLAP}",
    ),
    "PP4 interleaved-zero-bubble, Et|t*2|t|mL, one token ahead": (
        4,
        f"--pipeline-model-parallel-size 4 {SPLIT} Et|t*2|t|mL {BY} interleaved-zero-bubble",
    ),
    "TP2 SP PP2 zbv FSDP2, Et*2|t|t|mL, one token ahead": (
        8,
        f"{TP2_SP} {PP2} {SPLIT} Et*2|t|t|mL {BY} zbv {FSDP2}",
    ),
    "PP2 EP2, Et*4|mL, a token ahead by latents and experts": (4, f"{PP2} {SPLIT} Et*4|mL {EP2} {ALLTOALL}"),
    "one process, recompute full uniform, two tokens ahead": (1, f"{RECOMPUTED} 1 --recompute-method uniform"),
    "one process, recompute selective, two tokens ahead": (1, "--recompute-granularity selective"),
}
QUICK_AHEAD = {
    "PP2, Et*4|mL, one token ahead",
    "TP2 SP PP2 VPP2, one token ahead",
    "CP2 all_gather, two tokens ahead, packed",
}

# Pieces that no other model has, each in layouts that might take it for the usual one.
PIECES = {
    "TP2 SP PP2 VPP2, interleaved half rotation, none in layer 2": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 p2p, interleaved half rotation, none in layer 2": (2, f"{CP2} p2p"),
    "TP2 SP PP2 EP2, experts in two layers": (
        4,
        f"{TP2_SP} --pipeline-model-parallel-size 2 {EP2} {ALLTOALL} --expert-tensor-parallel-size 1",
    ),
    "PP2, 1 and 3 layers, experts in two layers": (
        2,
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    ),
    "EP2, experts with biases": (2, EP2),
    "TP2 SP PP2 VPP2 EP2, experts with biases": (
        4,
        f"{TP2_SP} {PP2_VPP2} {EP2} {ALLTOALL} --expert-tensor-parallel-size 1",
    ),
    "TP2 SP, tensor-parallel experts, experts with biases": (2, TP2_SP),
    "TP2 SP EP2, tensor-parallel experts, alltoall, experts with biases": (4, f"{TP2_SP} {EP2} {ALLTOALL}"),
    "CP2 EP2 all_gather, experts with biases": (2, f"{CP2} all_gather {EP2} {ALLTOALL}"),
    "EP2 ZeRO-3, experts with biases": (2, f"{EP2} {MEGATRON_FSDP} optim_grads_params"),
    "EP2, expert DP2, distributed optimizer, overlap, experts with biases": (4, f"{EP2} {OVERLAP} {ALLTOALL}"),
    "one process, recompute full uniform, experts with biases": (1, f"{RECOMPUTED} 1 --recompute-method uniform"),
    "TP2 SP PP2 VPP2 EP2, sparsely mixed experts": (4, f"{TP2_SP} {PP2_VPP2} {EP2} --expert-tensor-parallel-size 1"),
    "EP2, experts with a capacity": (2, EP2),
    "TP2 SP PP2 VPP2 EP2, experts with a capacity": (
        4,
        f"{TP2_SP} {PP2_VPP2} {EP2} {ALLTOALL} --expert-tensor-parallel-size 1",
    ),
    "TP4 SP, experts with a capacity": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "CP2 EP2, experts with a capacity": (2, f"{CP2} p2p {EP2} {ALLTOALL}"),
    "EP2 ZeRO-3, experts with a capacity": (2, f"{EP2} {MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform, experts with a capacity": (1, f"{RECOMPUTED} 1 --recompute-method uniform"),
    "TP4 SP, query and key norm after rotation": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "CP2 a2a, query and key norm after rotation": (2, f"{CP2} a2a"),
    "TP2 SP PP2 VPP2, sinks and gates": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, sinks and gates": (4, "--tensor-model-parallel-size 4"),
    "CP2 p2p, sinks and gates": (2, f"{CP2} p2p"),
    "CP2 a2a, sinks and gates": (2, f"{CP2} a2a"),
    "TP2 SP FSDP2, sinks and gates": (4, f"{TP2_SP} {FSDP2}"),
    "ZeRO-3, sinks and gates": (2, f"{MEGATRON_FSDP} optim_grads_params"),
    "DP2 distributed optimizer, overlap, sinks and gates": (2, OVERLAP),
    "TP2 SP PP2 VPP2, gates of heads": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, gates of heads": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, gates of heads": (2, f"{CP2} a2a"),
    "TP2 SP FSDP2, gates of heads": (4, f"{TP2_SP} {FSDP2}"),
    "TP2 SP PP2 VPP2, loss of the normalizer": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 a2a, loss of the normalizer": (2, f"{CP2} a2a"),
    "TP2 SP FSDP2, loss of the normalizer": (4, f"{TP2_SP} {FSDP2}"),
    "one process, recompute selective, sinks and gates": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, caps and clips": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 all_gather, caps and clips": (2, f"{CP2} all_gather"),
    "TP2 SP PP2 VPP2, rotation by layer": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 all_gather, rotation by layer": (2, f"{CP2} all_gather"),
    "DP2 FSDP2, rotation by layer": (2, FSDP2),
    "TP2 SP PP2 VPP2, heads by layer": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, heads by layer": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, heads by layer": (2, f"{CP2} a2a"),
    "CP2 all_gather, heads by layer, packed": (2, f"{CP2} all_gather"),
    "CP2 p2p, longrope": (2, f"{CP2} p2p"),
    "TP2 SP PP2 VPP2, longrope": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP2 SP PP2 VPP2, temperature": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 p2p, temperature": (2, f"{CP2} p2p"),
    "CP2 a2a, temperature": (2, f"{CP2} a2a"),
    "CP2 all_gather, temperature, packed": (2, f"{CP2} all_gather"),
    "TP2, xIELU": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP PP2 VPP2, xIELU": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, xIELU": (4, "--tensor-model-parallel-size 4"),
    "CP2 p2p, xIELU": (2, f"{CP2} p2p"),
    "TP2 SP FSDP2, xIELU": (4, f"{TP2_SP} {FSDP2}"),
    "ZeRO-3, xIELU": (2, f"{MEGATRON_FSDP} optim_grads_params"),
    "DP2 distributed optimizer, overlap, xIELU": (2, OVERLAP),
    "one process, recompute selective, xIELU": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, bounded quick GeGLU": (4, f"{TP2_SP} {PP2_VPP2}"),
    "ZeRO-3, bounded quick GeGLU": (2, f"{MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute selective, bounded quick GeGLU": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, ALiBi": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 p2p, ALiBi": (2, f"{CP2} p2p"),
    "CP2 a2a, ALiBi": (2, f"{CP2} a2a"),
    "CP2 all_gather, packed ALiBi": (2, f"{CP2} all_gather"),
    "TP2 SP PP2 VPP2, LayerNorm without bias": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP2 SP PP2 VPP2, some biases": (4, f"{TP2_SP} {PP2_VPP2}"),
    "one process, recompute selective, some biases": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, GeGLU and multipliers": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 p2p, GeGLU and multipliers": (2, f"{CP2} p2p"),
    "one process, recompute selective, GeGLU and multipliers": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, Command R": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, Command R": (4, "--tensor-model-parallel-size 4"),
    "TP2 SP PP2 VPP2, Command R Plus": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, Command R Plus": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, Command R Plus": (2, f"{CP2} a2a"),
    "TP2 SP FSDP2, Command R Plus": (4, f"{TP2_SP} {FSDP2}"),
    "CP2 p2p, Command R": (2, f"{CP2} p2p"),
    "TP2 SP FSDP2, Command R": (4, f"{TP2_SP} {FSDP2}"),
    "TP2, recompute selective, Command R": (2, f"--tensor-model-parallel-size 2 {RECOMPUTE['selective, all parts']}"),
    "TP2 SP PP2 VPP2, Phi": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, Phi": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, Phi": (2, f"{CP2} a2a"),
    "TP2 SP FSDP2, Phi": (4, f"{TP2_SP} {FSDP2}"),
    "ZeRO-3, Phi": (2, f"{MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP PP2 VPP2, GPT-NeoX": (4, f"{TP2_SP} {PP2_VPP2}"),
    "TP4, GPT-NeoX": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, GPT-NeoX": (2, f"{CP2} a2a"),
    "TP2 SP ZeRO-3, GPT-NeoX": (4, f"{TP2_SP} {MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP, recompute selective, GPT-NeoX": (2, f"{TP2_SP} {RECOMPUTE['selective, all parts']}"),
    "TP2 SP PP2 VPP2, Command R7B": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 all_gather, Command R7B": (2, f"{CP2} all_gather"),
    "TP2 SP PP2 VPP2, clipped products": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 p2p, clipped products": (2, f"{CP2} p2p"),
    "CP2 a2a, clipped products": (2, f"{CP2} a2a"),
    "TP2 SP FSDP2, clipped products": (4, f"{TP2_SP} {FSDP2}"),
    "ZeRO-3, clipped products": (2, f"{MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP PP2 VPP2, clipped latents": (4, f"{TP2_SP} {PP2_VPP2}"),
    "CP2 all_gather, clipped latents": (2, f"{CP2} all_gather"),
    "DP2 distributed optimizer, overlap, clipped products by Adam": (2, OVERLAP),
    "CP2 all_gather, clipped products by Adam": (2, f"{CP2} all_gather"),
    "one process, recompute selective, clipped products by Adam": (1, RECOMPUTE["selective, all parts"]),
}
