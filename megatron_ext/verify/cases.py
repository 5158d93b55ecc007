"""Lists the layouts that are compared with one process, and the models that they are compared on.

    case = CASES["TP2 SP, tied"]
    case.flags                       # ("--tensor-model-parallel-size", "2", "--sequence-parallel")

Every case starts from the same seed and no checkpoint.
"""

from dataclasses import dataclass, replace

# Weights of about 1 / sqrt(width) rather than the usual 0.02: with those, at this width, attention is nearly uniform
# and the first loss nearly ln(vocabulary), whatever is wrong.
RECIPE = (
    "--hidden-size 64 --num-attention-heads 4 --init-method-std 0.1 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 20 --optimizer adam --lr 1e-3 --lr-warmup-iters 10 --lr-decay-style constant "
    "--hidden-dropout 0 --attention-dropout 0"
)

_LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--group-query-attention --num-query-groups 2"
)
_UNTIED = "--untie-embeddings-and-output-weights"

# The vocabulary is 256 bytes and the end of a document, padded to a multiple of 128 x TP: 384 rows in one process, 512
# at TP2, and 512 at TP4, where the last rank holds nothing but padding.
MODELS = {
    "tied": f"--num-layers 4 {_LLAMA}",
    "untied": f"--num-layers 4 {_LLAMA} {_UNTIED}",
    "8 layers, tied": f"--num-layers 8 {_LLAMA}",
    "8 layers, untied": f"--num-layers 8 {_LLAMA} {_UNTIED}",
    "learned positions, biases": "--num-layers 4",
    "experts": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --num-experts 8 --moe-ffn-hidden-size 48 "
        "--moe-shared-expert-intermediate-size 40 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
    ),
    "packed": f"--num-layers 4 {_LLAMA} {_UNTIED} --reset-position-ids --reset-attention-mask",
    "packed, learned positions": "--num-layers 4 --reset-position-ids --reset-attention-mask",
    "windows": f"--num-layers 4 {_LLAMA} {_UNTIED} --window-size 15,0 --window-attn-skip-freq 2",
    "windows, packed": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --window-size 15,0 --window-attn-skip-freq [1,1,0,1] --reset-position-ids "
        "--reset-attention-mask"
    ),
    "interleaved half rotation, none in layer 2": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --rotary-percent 0.5 --rotary-interleaved --no-rope-freq [0,1,0,0]"
    ),
    "GeGLU and multipliers": (
        f"--num-layers 4 {_LLAMA.replace('--swiglu', '--geglu --openai-gelu')} --embedding-multiplier 8 "
        "--residual-multiplier 0.7 --logits-multiplier 0.3 --softmax-scale 0.4"
    ),
    "sinks and gates": f"--num-layers 4 {_LLAMA} {_UNTIED} --softmax-type learnable --attention-output-gate",
    "caps and clips": (
        f"--num-layers 4 {_LLAMA} --window-size 15,0 --window-attn-skip-freq 2 --attention-logit-softcapping 2 "
        "--final-logit-softcapping 4 --qkv-clip 1 --norm-position both"
    ),
    "ALiBi": "--num-layers 4 --position-embedding-type alibi --embed-layernorm",
    "packed ALiBi": "--num-layers 4 --position-embedding-type alibi --softmax-type off-by-one --reset-attention-mask",
    "experts in two layers": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --num-experts 8 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.1 "
        "--moe-layer-freq [0,1,0,1]"
    ),
    "routing by groups": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --num-experts 16 --moe-ffn-hidden-size 24 --moe-router-topk 4 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype "
        "fp32 --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate --moe-aux-loss-coeff 0.1 "
        "--moe-router-load-balancing-type seq_aux_loss"
    ),
    "routing with two losses": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --num-experts 8 --moe-ffn-hidden-size 48 --moe-layer-freq [0,1,1,1] "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-group-scores 2 --moe-router-load-balancing-type aux_loss "
        "global_aux_loss --moe-aux-loss-coeff 0.1 0.2"
    ),
    "query and key norm after rotation": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --qk-layernorm --qk-layernorm-place after"
    ),
    "LayerNorm without bias": (
        f"--num-layers 4 {_LLAMA.replace('RMSNorm', 'LayerNorm')} {_UNTIED} --norm-parameters weight --qk-layernorm"
    ),
    "some biases": f"--num-layers 4 {_LLAMA} {_UNTIED} --add-output-bias --add-mlp-bias",
    "query and key norm, QKV bias": f"--num-layers 4 {_LLAMA} {_UNTIED} --qk-layernorm --add-qkv-bias",
    "OLMo-2": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --norm-position after --qk-layernorm --qk-layernorm-over projection"
    ),
}

_COMMAND_R = (
    f"--num-layers 4 {_LLAMA.replace('RMSNorm', 'LayerNorm')} --norm-parameters weight --rotary-interleaved "
    "--logits-multiplier 0.3 --parallel-residual one-norm"
)
MODELS |= {
    "Command R": _COMMAND_R,
    "Command R7B": f"{_COMMAND_R} --window-size 15,0 --window-attn-skip-freq 4 --no-rope-freq 4",
    "GPT-NeoX": (
        f"--num-layers 4 --position-embedding-type rope --rotary-percent 0.25 {_UNTIED} --parallel-residual two-norms"
    ),
}

MODELS["Phi"] = (
    "--num-layers 4 --position-embedding-type rope --rotary-percent 0.5 --openai-gelu --parallel-residual one-norm "
    f"--lm-head-bias {_UNTIED}"
)
_EVERY_SECOND = "--window-size 15,0 --window-attn-skip-freq 2"
_LISTS = "--longrope-short-factor 1 1 1 1 1 1 1 1 --longrope-long-factor 1 1.1 1.3 1.8 2.5 4 6 9"
MODELS |= {
    "rotation by layer": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} {_EVERY_SECOND} --rotary-base-local 100 --rope-type yarn "
        "--rotary-scaling-factor 4 --original-max-position-embeddings 32"
    ),
    "longrope": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --rope-type longrope --original-max-position-embeddings 32 "
        f"--rotary-scaling-factor 4 {_LISTS}"
    ),
    "temperature": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --no-rope-freq 2 --qk-l2-norm --attention-temperature-scale 0.5 "
        "--attention-temperature-step 5"
    ),
    "temperature, packed": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --no-rope-freq 2 --attention-temperature-scale 0.5 "
        "--attention-temperature-step 5 --reset-position-ids --reset-attention-mask"
    ),
    # Smaller MLPs and another output matrix, for which no gradient of xIELU's numbers is all but cancelled.
    "xIELU": f"--num-layers 4 {_LLAMA.replace('--swiglu', '--xielu')} {_UNTIED} --qk-layernorm --ffn-hidden-size 64",
    "bounded quick GeGLU": (
        f"--num-layers 4 {_LLAMA.replace('--swiglu', '--quick-geglu')} --activation-func-clamp-value 2 "
        "--glu-linear-offset 1 --add-mlp-bias"
    ),
}

_LATENT_SIZES = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --multi-latent-attention "
    "--qk-layernorm --kv-lora-rank 24 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16"
)
_YARN = "--rotary-scaling-factor 4 --original-max-position-embeddings 32 --mscale 0.7 --mscale-all-dim 0.4"
MODELS |= {
    "latents": f"--num-layers 4 {_LATENT_SIZES} --q-lora-rank 20 {_YARN} {_UNTIED}",
    "latents of keys alone": f"--num-layers 4 {_LATENT_SIZES} {_UNTIED}",
    "latents, packed": (
        f"--num-layers 4 {_LATENT_SIZES} --q-lora-rank 20 {_UNTIED} --reset-position-ids --reset-attention-mask"
    ),
}

# Gated delta rules in every other layer, whose value heads share key heads in twos; and as Qwen3-Next has them. What a
# head reads is near zero where its query and key are nearly at right angles; the norm divides by that, and with an
# epsilon of 1e-5 such tokens make the gradients of fp32 differ from those of fp64 by 1e-5 in one process.
_DELTA_SIZES = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 12 "
    "--linear-value-head-dim 10 --linear-num-key-heads 4 --linear-num-value-heads 8 --norm-epsilon 1e-3"
)
MODELS |= {
    "delta rules": f"--num-layers 4 {_LLAMA} {_UNTIED} {_DELTA_SIZES}",
    "delta rules, packed": f"{MODELS['packed']} {_DELTA_SIZES}",
    "Qwen3-Next": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} {_DELTA_SIZES} --attention-output-gate --qk-layernorm --rotary-percent 0.5 "
        "--num-experts 8 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate "
        "--moe-aux-loss-coeff 0.1"
    ),
}

# Muon with updates as large as Adam's.
_MUON = "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2"
MODELS |= {
    f"{model}, Muon": f"{MODELS[model]} {_MUON}" for model in ("untied", "sinks and gates", "experts", "latents")
}
MODELS |= {
    "one token ahead": f"--num-layers 4 {_LLAMA} --mtp-num-layers 1",
    "two tokens ahead": f"--num-layers 4 {_LLAMA} {_UNTIED} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5",
    "two tokens ahead, packed": f"{MODELS['packed']} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5",
    "a token ahead by latents and experts": (
        f"--num-layers 4 {_LATENT_SIZES} --num-experts 8 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.1 "
        "--moe-layer-freq [0,1,1,1] --mtp-num-layers 1"
    ),
}

_TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
_PP2_VPP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
_PP4_VPP2 = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_CP2 = "--context-parallel-size 2 --cp-comm-type"
_CP4 = "--context-parallel-size 4 --cp-comm-type"
_RECOMPUTE = "--recompute-granularity full --recompute-num-layers"

_LAYOUTS = {
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP4": (4, "--tensor-model-parallel-size 4"),
    "TP2 SP": (2, _TP2_SP),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "PP2 VPP2": (2, _PP2_VPP2),
    "PP4 VPP2": (4, _PP4_VPP2),
    "DP2": (2, ""),
    "DP4": (4, ""),
    "DP2 distributed optimizer": (2, "--use-distributed-optimizer"),
    "DP2 distributed optimizer, overlap": (2, _OVERLAP),
    "TP2 SP PP2 VPP2 DP2 distributed optimizer, overlap": (8, f"{_TP2_SP} {_PP2_VPP2} {_OVERLAP}"),
}

# Stages that differ in their layers, on the model with 4.
_UNEVEN = {
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
        f"{_TP2_SP} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t*3|t|L",
    ),
}
_FSDP2 = "--use-torch-fsdp2"
_MEGATRON_FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
_TWO_COPIES = "--num-distributed-optimizer-instances 2"
# What data-parallel ranks divide among themselves.
_SHARDED = {
    "FSDP2": (2, _FSDP2),
    "FSDP2 on 4": (4, _FSDP2),
    "FSDP2 without resharding": (2, f"{_FSDP2} --torch-fsdp2-no-reshard-after-forward"),
    "FSDP2, activations checkpointed": (2, f"{_FSDP2} {_RECOMPUTE} 1 --recompute-method uniform"),
    "TP2 FSDP2": (4, f"--tensor-model-parallel-size 2 {_FSDP2}"),
    "TP2 SP FSDP2": (4, f"{_TP2_SP} {_FSDP2}"),
    "CP2 FSDP2": (2, f"{_CP2} p2p {_FSDP2}"),
    "CP2 DP2 FSDP2": (4, f"{_CP2} all_gather {_FSDP2}"),
    "FSDP2, compiled": (2, f"{_FSDP2} --torch-compile"),
    "FSDP2 in host memory": (2, f"{_FSDP2} --torch-fsdp2-cpu-offload"),
    "TP2 SP FSDP2 in host memory": (4, f"{_TP2_SP} {_FSDP2} --torch-fsdp2-cpu-offload"),
    "Megatron-FSDP, nothing sharded": (2, f"{_MEGATRON_FSDP} no_shard"),
    "Megatron-FSDP, ZeRO-1": (2, f"{_MEGATRON_FSDP} optim"),
    "ZeRO-2": (2, f"{_MEGATRON_FSDP} optim_grads"),
    "ZeRO-2 on 4": (4, f"{_MEGATRON_FSDP} optim_grads"),
    "ZeRO-3": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "ZeRO-3 on 4": (4, f"{_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP ZeRO-2": (4, f"{_TP2_SP} {_MEGATRON_FSDP} optim_grads"),
    "TP2 SP ZeRO-3": (4, f"{_TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
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
_CONTEXT = {
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
    "TP2 SP CP2 PP2 p2p, untied": (8, f"{_TP2_SP} {_CP2} p2p --pipeline-model-parallel-size 2"),
    "TP2 SP CP2 PP2 all_gather, tied": (8, f"{_TP2_SP} {_CP2} all_gather --pipeline-model-parallel-size 2"),
    "TP2 SP CP2 PP2 a2a, learned positions, biases": (8, f"{_TP2_SP} {_CP2} a2a --pipeline-model-parallel-size 2"),
    "TP2 SP CP4 all_gather, query and key norm, QKV bias": (8, f"{_TP2_SP} {_CP4} all_gather"),
    "CP2 PP2 VPP2 all_gather, untied": (4, f"{_CP2} all_gather {_PP2_VPP2}"),
    "CP2 DP2 p2p distributed optimizer, overlap, tied": (4, f"{_CP2} p2p {_OVERLAP}"),
    "CP2 DP2 all_gather distributed optimizer, untied": (4, f"{_CP2} all_gather --use-distributed-optimizer"),
    "DP2, packed": (2, ""),
    "TP2 SP, packed": (2, _TP2_SP),
    "PP4, packed": (4, "--pipeline-model-parallel-size 4"),
    "PP2 VPP2, packed, learned positions": (2, _PP2_VPP2),
    "CP2 all_gather, packed": (2, f"{_CP2} all_gather"),
    "CP4 all_gather, packed, learned positions": (4, f"{_CP4} all_gather"),
    "CP2 a2a, packed": (2, f"{_CP2} a2a"),
    "TP2 SP CP2 PP2 all_gather, packed": (8, f"{_TP2_SP} {_CP2} all_gather --pipeline-model-parallel-size 2"),
}
"""Samples divided over ranks, or into documents: layout and model, ranks, flags."""

# Of the uneven and the divided, what is part of every test run.
_QUICK = {
    "CP2 a2a, untied",
    "CP4 p2p, untied",
    "CP2 DP2 all_gather distributed optimizer, untied",
    "CP2 all_gather, packed",
    "TP2 SP FSDP2, tied",
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
_EXPERT_LAYOUTS = {
    "EP2": (2, _EP2),
    "EP2, alltoall": (2, f"{_EP2} {_ALLTOALL}"),
    "EP4": (4, "--expert-model-parallel-size 4"),
    "EP4, alltoall": (4, f"--expert-model-parallel-size 4 {_ALLTOALL}"),
    "EP2, expert DP2, distributed optimizer, overlap, alltoall": (4, f"{_EP2} {_OVERLAP} {_ALLTOALL}"),
    "TP2 SP EP1": (2, _TP2_SP),
    "TP2 SP, whole experts on every rank": (2, f"{_TP2_SP} --expert-tensor-parallel-size 1 {_ALLTOALL}"),
    "TP2 SP EP2 on the same ranks": (2, f"{_TP2_SP} {_EP2} --expert-tensor-parallel-size 1 {_ALLTOALL}"),
    "TP2 SP EP2, tensor-parallel experts": (4, f"{_TP2_SP} {_EP2}"),
    "TP2 SP EP2, tensor-parallel experts, alltoall": (4, f"{_TP2_SP} {_EP2} {_ALLTOALL}"),
    "CP2 EP2 on the same ranks, alltoall": (2, f"--context-parallel-size 2 {_EP2} {_ALLTOALL}"),
    "TP2 SP CP2 EP2, distributed optimizer": (
        4,
        f"{_TP2_SP} --context-parallel-size 2 {_EP2} --use-distributed-optimizer",
    ),
    "EP2 ZeRO-3": (2, f"{_EP2} {_MEGATRON_FSDP} optim_grads_params"),
    "EP2, expert DP2, ZeRO-2, alltoall": (4, f"{_EP2} {_MEGATRON_FSDP} optim_grads {_ALLTOALL}"),
    "TP2 SP EP2, ZeRO-3": (4, f"{_TP2_SP} {_EP2} {_MEGATRON_FSDP} optim_grads_params"),
    "EP2, HSDP 2 x 2, distributed optimizer, overlap": (4, f"{_EP2} {_OVERLAP} {_TWO_COPIES}"),
    "EP2, HSDP 2 x 2, ZeRO-3, alltoall": (4, f"{_EP2} {_MEGATRON_FSDP} optim_grads_params {_TWO_COPIES} {_ALLTOALL}"),
    "EP2 PP2 DP2": (4, f"{_EP2} --pipeline-model-parallel-size 2 {_ALLTOALL}"),
    "EP2 PP2 DP4, expert DP2, distributed optimizer": (
        8,
        f"{_EP2} --pipeline-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "TP2 SP PP2 VPP2 DP2 EP2, expert DP2, distributed optimizer, alltoall": (
        8,
        f"{_TP2_SP} {_PP2_VPP2} {_EP2} --expert-tensor-parallel-size 1 {_OVERLAP} {_ALLTOALL}",
    ),
}
_QUICK_EXPERTS = {"EP2 PP2 DP2"}

# Experts chosen by scores with a bias, which every step moves by the load of the global batch, from groups of them.
_ROUTING = {
    "EP2": (2, f"{_EP2} {_ALLTOALL}"),
    "EP4": (4, "--expert-model-parallel-size 4"),
    "TP2 SP EP2, tensor-parallel experts": (4, f"{_TP2_SP} {_EP2}"),
    "CP2 EP2 on the same ranks": (2, f"--context-parallel-size 2 {_EP2} {_ALLTOALL}"),
    "EP2 PP2 VPP2": (4, f"{_PP2_VPP2} {_EP2} {_ALLTOALL}"),
    "EP2 ZeRO-3": (2, f"{_EP2} {_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP EP2 on the same ranks": (2, f"{_TP2_SP} {_EP2} --expert-tensor-parallel-size 1 {_ALLTOALL}"),
    "DP2 distributed optimizer, overlap": (2, _OVERLAP),
    "one process, recompute full uniform": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
}
_TWICE = [*_ROUTING][:6]  # what divides tokens or layers, over which the losses are added up

_QUICK_ROUTING = {"TP2 SP EP2, tensor-parallel experts"}

# Norms after attention and MLP, and norms of queries and keys over the heads of all ranks. At TP4 two ranks share each
# of the two key heads.
_OLMO2 = {
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP4": (4, "--tensor-model-parallel-size 4"),
    "TP2 SP PP2 VPP2": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p": (2, f"{_CP2} p2p"),
    "DP2 distributed optimizer, overlap": (2, _OVERLAP),
    "TP2 SP FSDP2": (4, f"{_TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3": (4, f"{_TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
    "one process, recompute selective": (1, "--recompute-granularity selective --recompute-modules core_attn mlp"),
}
_QUICK_OLMO2 = {"TP4"}

# Windows of 16 positions in some layers; a window ends in another rank's chunk, in another document, or in none.
_WINDOWS = {
    "TP2 SP PP2 VPP2, windows": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, windows": (2, f"{_CP2} all_gather"),
    "CP2 a2a, windows": (2, f"{_CP2} a2a"),
    "DP2 FSDP2, windows": (2, _FSDP2),
    "one process, recompute selective, windows": (1, "--recompute-granularity selective"),
    "CP2 all_gather, windows, packed": (2, f"{_CP2} all_gather"),
}
_QUICK_WINDOWS = {"CP2 all_gather, windows", "CP2 all_gather, windows, packed"}

# Latent attention, with and without latents of queries: whole down projections, and a part of the key that all heads
# of all ranks share.
_LATENTS = {
    "TP2, latents": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP, latents": (2, _TP2_SP),
    "TP2, latents of keys alone": (2, "--tensor-model-parallel-size 2"),
    "TP4 SP, latents of keys alone": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "TP2 SP PP2 VPP2, latents": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "TP2 SP CP2 PP2 all_gather, latents": (8, f"{_TP2_SP} {_CP2} all_gather --pipeline-model-parallel-size 2"),
    "CP2 p2p, latents": (2, f"{_CP2} p2p"),
    "CP2 all_gather, latents": (2, f"{_CP2} all_gather"),
    "CP2 a2a, latents": (2, f"{_CP2} a2a"),
    "DP2 distributed optimizer, overlap, latents": (2, _OVERLAP),
    "TP2 SP FSDP2, latents": (4, f"{_TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3, latents": (4, f"{_TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute full uniform, latents": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
    "one process, recompute selective, latents": (
        1,
        "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "TP2 SP, latents, packed": (2, _TP2_SP),
    "CP2 all_gather, latents, packed": (2, f"{_CP2} all_gather"),
}
_QUICK_LATENTS = {"TP2, latents", "TP2 SP CP2 PP2 all_gather, latents", "TP4 SP, latents of keys alone"}

# Gated delta rules: heads, states and inputs of the convolution of other ranks; documents within and across ranks.
_DELTA = {
    "TP2 SP PP2 VPP2, delta rules": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP4 p2p, delta rules": (4, f"{_CP4} p2p"),
    "DP2 distributed optimizer, overlap, delta rules": (2, _OVERLAP),
    "TP2 SP FSDP2, delta rules": (4, f"{_TP2_SP} {_FSDP2}"),
    "TP2 SP ZeRO-3, delta rules": (4, f"{_TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "CP2 p2p, recompute selective, delta rules": (
        2,
        f"{_CP2} p2p --recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ),
    "CP4 all_gather, delta rules, packed": (4, f"{_CP4} all_gather"),
    "TP2 SP EP2, Qwen3-Next": (4, f"{_TP2_SP} {_EP2}"),
}
_QUICK_DELTA = {"CP4 all_gather, delta rules, packed", "TP2 SP PP2 VPP2, delta rules"}

# Multi-token prediction: the last stage has word embeddings, and labels come from another rank's chunk of a sample.
_PP2 = "--pipeline-model-parallel-size 2"
_AHEAD = {
    "TP2, one token ahead": (2, "--tensor-model-parallel-size 2"),
    "PP2 VPP2, two tokens ahead": (2, _PP2_VPP2),
    "PP3, 1, 2 and 1 layers, two tokens ahead": (3, _UNEVEN["PP3, 1, 2 and 1 layers"][1]),
    "TP2 SP PP2 VPP2, one token ahead": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "TP2 SP CP2 PP2 all_gather, two tokens ahead": (8, f"{_TP2_SP} {_CP2} all_gather {_PP2}"),
    "CP4 p2p, two tokens ahead": (4, f"{_CP4} p2p"),
    "CP2 a2a, two tokens ahead": (2, f"{_CP2} a2a"),
    "PP2 DP2 distributed optimizer, overlap, two tokens ahead, packed": (4, f"{_PP2} {_OVERLAP}"),
    "CP2 all_gather, two tokens ahead, packed": (2, f"{_CP2} all_gather"),
    "TP2 SP FSDP2, one token ahead": (4, f"{_TP2_SP} {_FSDP2}"),
    "ZeRO-2, one token ahead": (2, f"{_MEGATRON_FSDP} optim_grads"),
    "TP2 SP ZeRO-3, two tokens ahead": (4, f"{_TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP EP2, a token ahead by latents and experts": (4, f"{_TP2_SP} {_EP2}"),
    "PP2 EP2, a token ahead by latents and experts": (4, f"{_PP2} {_EP2} {_ALLTOALL}"),
    "one process, recompute full uniform, two tokens ahead": (1, f"{_RECOMPUTE} 1 --recompute-method uniform"),
    "one process, recompute selective, two tokens ahead": (1, "--recompute-granularity selective"),
}
_QUICK_AHEAD = {"TP2 SP PP2 VPP2, one token ahead", "CP2 all_gather, two tokens ahead, packed"}

RECOMPUTE = {
    "full uniform": f"{_RECOMPUTE} 1 --recompute-method uniform",
    "full uniform by twos": f"{_RECOMPUTE} 2 --recompute-method uniform",
    "full block": f"{_RECOMPUTE} 1 --recompute-method block",
    "selective": "--recompute-granularity selective",
    "selective, all parts": "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
}

# Pieces that no other model has, each in layouts that might take it for the usual one.
_PIECES = {
    "TP2 SP PP2 VPP2, interleaved half rotation, none in layer 2": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, interleaved half rotation, none in layer 2": (2, f"{_CP2} p2p"),
    "TP2 SP PP2 EP2, experts in two layers": (
        4,
        f"{_TP2_SP} --pipeline-model-parallel-size 2 {_EP2} {_ALLTOALL} --expert-tensor-parallel-size 1",
    ),
    "PP2, 1 and 3 layers, experts in two layers": (
        2,
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    ),
    "TP4 SP, query and key norm after rotation": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "CP2 a2a, query and key norm after rotation": (2, f"{_CP2} a2a"),
    "TP2 SP PP2 VPP2, sinks and gates": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "TP4, sinks and gates": (4, "--tensor-model-parallel-size 4"),
    "CP2 p2p, sinks and gates": (2, f"{_CP2} p2p"),
    "CP2 a2a, sinks and gates": (2, f"{_CP2} a2a"),
    "TP2 SP FSDP2, sinks and gates": (4, f"{_TP2_SP} {_FSDP2}"),
    "ZeRO-3, sinks and gates": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "DP2 distributed optimizer, overlap, sinks and gates": (2, _OVERLAP),
    "one process, recompute selective, sinks and gates": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, caps and clips": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, caps and clips": (2, f"{_CP2} all_gather"),
    "TP2 SP PP2 VPP2, rotation by layer": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, rotation by layer": (2, f"{_CP2} all_gather"),
    "DP2 FSDP2, rotation by layer": (2, _FSDP2),
    "CP2 p2p, longrope": (2, f"{_CP2} p2p"),
    "TP2 SP PP2 VPP2, longrope": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "TP2 SP PP2 VPP2, temperature": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, temperature": (2, f"{_CP2} p2p"),
    "CP2 a2a, temperature": (2, f"{_CP2} a2a"),
    "CP2 all_gather, temperature, packed": (2, f"{_CP2} all_gather"),
    "TP2, xIELU": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP PP2 VPP2, xIELU": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "TP4, xIELU": (4, "--tensor-model-parallel-size 4"),
    "CP2 p2p, xIELU": (2, f"{_CP2} p2p"),
    "TP2 SP FSDP2, xIELU": (4, f"{_TP2_SP} {_FSDP2}"),
    "ZeRO-3, xIELU": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "DP2 distributed optimizer, overlap, xIELU": (2, _OVERLAP),
    "one process, recompute selective, xIELU": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, bounded quick GeGLU": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "ZeRO-3, bounded quick GeGLU": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "one process, recompute selective, bounded quick GeGLU": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, ALiBi": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, ALiBi": (2, f"{_CP2} p2p"),
    "CP2 a2a, ALiBi": (2, f"{_CP2} a2a"),
    "CP2 all_gather, packed ALiBi": (2, f"{_CP2} all_gather"),
    "TP2 SP PP2 VPP2, LayerNorm without bias": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "TP2 SP PP2 VPP2, some biases": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "one process, recompute selective, some biases": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, GeGLU and multipliers": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP2 p2p, GeGLU and multipliers": (2, f"{_CP2} p2p"),
    "one process, recompute selective, GeGLU and multipliers": (1, RECOMPUTE["selective, all parts"]),
    "TP2 SP PP2 VPP2, Command R": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "TP4, Command R": (4, "--tensor-model-parallel-size 4"),
    "CP2 p2p, Command R": (2, f"{_CP2} p2p"),
    "TP2 SP FSDP2, Command R": (4, f"{_TP2_SP} {_FSDP2}"),
    "TP2, recompute selective, Command R": (2, f"--tensor-model-parallel-size 2 {RECOMPUTE['selective, all parts']}"),
    "TP2 SP PP2 VPP2, Phi": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "TP4, Phi": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, Phi": (2, f"{_CP2} a2a"),
    "TP2 SP FSDP2, Phi": (4, f"{_TP2_SP} {_FSDP2}"),
    "ZeRO-3, Phi": (2, f"{_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP PP2 VPP2, GPT-NeoX": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "TP4, GPT-NeoX": (4, "--tensor-model-parallel-size 4"),
    "CP2 a2a, GPT-NeoX": (2, f"{_CP2} a2a"),
    "TP2 SP ZeRO-3, GPT-NeoX": (4, f"{_TP2_SP} {_MEGATRON_FSDP} optim_grads_params"),
    "TP2 SP, recompute selective, GPT-NeoX": (2, f"{_TP2_SP} {RECOMPUTE['selective, all parts']}"),
    "TP2 SP PP2 VPP2, Command R7B": (4, f"{_TP2_SP} {_PP2_VPP2}"),
    "CP2 all_gather, Command R7B": (2, f"{_CP2} all_gather"),
}
# Layouts in which ranks have rows, columns, experts or whole matrices: the same cases with Muon, of these a few quick.
_QUICK_MUON = {"TP4, untied", "TP2 SP FSDP2, untied", "TP2 SP EP2, tensor-parallel experts, experts"}
_MUON_CASES = {
    *_QUICK_MUON,
    *(f"{layout}, untied" for layout in ("TP2 SP", "PP2", "PP2 VPP2", "CP2 p2p", "DP2", "FSDP2", "ZeRO-2", "ZeRO-3")),
    *(f"DP{ranks} distributed optimizer, overlap, untied" for ranks in (2, 4)),
    *(f"HSDP 2 x 2, {scheme}, untied" for scheme in ("distributed optimizer", "FSDP2")),
    *("Megatron-FSDP, ZeRO-1, untied", "HSDP 2 x 2, ZeRO-3, optimizer state divided over all, untied"),
    *("EP2, experts", "EP2 ZeRO-3, experts", "TP2 SP CP2 EP2, distributed optimizer, experts"),
    *("TP2 SP PP2 VPP2, latents", "TP2 SP ZeRO-3, latents", "TP4, sinks and gates", "TP2 SP FSDP2, sinks and gates"),
    "TP2 SP PP2 VPP2 DP2 distributed optimizer, overlap, untied",
}


@dataclass(frozen=True)
class Case:
    """One layout of one model, to be compared with one process."""

    name: str
    model: str
    """Key of MODELS."""

    world_size: int
    flags: tuple[str, ...]
    """Flags in which the layout differs from the one process."""

    slow: bool = False
    """Whether the case is left to docs/parity.md and to `bash tests/run.sh --all`."""

    slow_in_bf16: bool = False
    """Whether the same holds for bf16 alone."""


def _cases() -> list[Case]:
    cases = []
    for layout, (world_size, flags) in _LAYOUTS.items():
        depth = "8 layers, " if layout == "PP4 VPP2" else ""
        for model in ("tied", "untied"):
            cases.append(Case(f"{layout}, {model}", f"{depth}{model}", world_size, tuple(flags.split())))
    for layout, (world_size, flags) in {**_UNEVEN, **_SHARDED}.items():
        for model in ("tied", "untied"):
            name = f"{layout}, {model}"
            cases.append(
                Case(name, model, world_size, tuple(flags.split()), slow=name not in _QUICK, slow_in_bf16=True)
            )
    for layout, (world_size, flags) in _EXPERT_LAYOUTS.items():
        name, slow = f"{layout}, experts", layout not in _QUICK_EXPERTS
        cases.append(Case(name, "experts", world_size, tuple(flags.split()), slow=slow, slow_in_bf16=True))
    routed = [("routing by groups", one) for one in _ROUTING] + [("routing with two losses", one) for one in _TWICE]
    for model, layout in routed:
        (world_size, flags), slow = _ROUTING[layout], layout not in _QUICK_ROUTING
        cases.append(Case(f"{layout}, {model}", model, world_size, tuple(flags.split()), slow, slow_in_bf16=True))
    # Biases and learned positions under sequence parallelism, and tied embeddings across a divided vocabulary.
    flags = f"{_TP2_SP} --pipeline-model-parallel-size 2"
    for model in ("learned positions, biases", "query and key norm, QKV bias"):
        cases.append(Case(f"TP2 SP PP2, {model}", model, 4, tuple(flags.split())))
    for name, (world_size, words) in _CONTEXT.items():
        model = max((model for model in MODELS if name.endswith(f", {model}")), key=len)
        slow = name not in _QUICK
        case = Case(name, model, world_size, tuple(words.split()), slow, slow_in_bf16=slow or "CP4" not in name)
        cases.append(case)
    for layout, (world_size, flags) in _OLMO2.items():
        slow = layout not in _QUICK_OLMO2
        cases.append(
            Case(f"{layout}, OLMo-2", "OLMo-2", world_size, tuple(flags.split()), slow, slow or layout == "TP4")
        )
    for name, (world_size, flags) in _WINDOWS.items():
        model = "windows, packed" if name.endswith("packed") else "windows"
        slow = name not in _QUICK_WINDOWS
        cases.append(Case(name, model, world_size, tuple(flags.split()), slow, slow_in_bf16=True))
    for name, (world_size, flags) in _LATENTS.items():
        model = max((model for model in MODELS if name.endswith(f", {model}")), key=len)
        slow = name not in _QUICK_LATENTS
        cases.append(Case(name, model, world_size, tuple(flags.split()), slow, slow_in_bf16=True))
    for name, (world_size, flags) in _DELTA.items():
        model = max((model for model in MODELS if name.endswith(f", {model}")), key=len)
        slow = name not in _QUICK_DELTA
        cases.append(Case(name, model, world_size, tuple(flags.split()), slow, slow_in_bf16=True))
    for name, (world_size, flags) in _AHEAD.items():
        model = max((model for model in MODELS if name.endswith(f", {model}")), key=len)
        slow = name not in _QUICK_AHEAD
        cases.append(Case(name, model, world_size, tuple(flags.split()), slow, slow_in_bf16=True))
    for name, (world_size, flags) in _PIECES.items():
        model = max((model for model in MODELS if name.endswith(f", {model}")), key=len)
        cases.append(Case(name, model, world_size, tuple(flags.split()), "PP2" not in name, slow_in_bf16=True))
    for case in [case for case in cases if case.name in _MUON_CASES]:
        slow, name, model = case.name not in _QUICK_MUON, f"{case.name}, Muon", f"{case.model}, Muon"
        cases.append(replace(case, name=name, model=model, slow=slow, slow_in_bf16=True))
    for mode, flags in RECOMPUTE.items():
        cases.append(Case(f"one process, recompute {mode}", "untied", 1, tuple(flags.split())))
    return cases


CASES = {case.name: case for case in _cases()}
