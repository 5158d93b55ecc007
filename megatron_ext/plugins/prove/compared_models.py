"""Lists the models that layouts are compared on (`plugins/prove/cases.py`), as flags of their shapes."""

from megatron_ext.registry import brought

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
    "positions with an offset, ReLU": "--num-layers 4 --position-embedding-offset 2 --relu",
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
    "gates of heads": (
        f"--num-layers 4 {_LLAMA} --attention-output-gate --attention-output-gate-over head --qk-layernorm"
    ),
    "loss of the normalizer": f"--num-layers 4 {_LLAMA} --z-loss-strength 0.01",
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
    "experts with biases": (
        f"--num-layers 4 {_LLAMA.replace('--swiglu', '--quick-geglu').replace('--disable-bias-linear ', '')} {_UNTIED} "
        "--activation-func-clamp-value 2 --glu-linear-offset 1 --softmax-type learnable --window-size 15,0 "
        "--window-attn-skip-freq 2 --num-experts 8 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.1 "
        "--moe-router-dtype fp32"
    ),
    "experts with a capacity": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --num-experts 8 --moe-ffn-hidden-size 48 --moe-expert-capacity-factor 0.8 "
        "--moe-router-pre-softmax --moe-router-dtype fp32"
    ),
    # Near enough for one expert alone, so that nothing is drawn at random.
    "sparsely mixed experts": (
        f"--num-layers 4 {_LLAMA} --num-experts 8 --moe-ffn-hidden-size 48 --moe-router-sparsemixer-eps 1e-9 "
        "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --moe-router-dtype fp32"
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
    "experts averaged with a shared one": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --num-experts 8 --moe-ffn-hidden-size 48 --moe-router-topk 3 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-of logits "
        "--moe-router-bias-update-rate 0.02 --moe-router-unnormalized --moe-shared-expert-intermediate-size 48 "
        "--moe-shared-expert-average --norm-position after-experts --moe-router-dtype fp32 --moe-aux-loss-coeff 0.1"
    ),
    "experts in a latent width": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --num-experts 8 --moe-ffn-hidden-size 48 --moe-latent-size 24 "
        "--moe-shared-expert-intermediate-size 40 --moe-aux-loss-coeff 0.1 --moe-layer-freq [0,1,1,1]"
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
    "Command R Plus": f"{_COMMAND_R} --qk-layernorm --qk-layernorm-over each-head",
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
    "heads by layer": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} {_EVERY_SECOND} --num-query-groups-local 4 --softmax-type-local learnable "
        "--value-channels 10 --value-multiplier 0.7 --rotary-base-local 100 --rotary-percent 0.5 --add-qkv-bias"
    ),
    "heads by layer, packed": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} {_EVERY_SECOND} --num-query-groups-local 1 --softmax-type-local off-by-one "
        "--value-channels 24 --value-multiplier 1.3 --reset-position-ids --reset-attention-mask"
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
    "latents and learned positions": (
        f"--num-layers 4 {_LATENT_SIZES.replace('rope', 'learned_absolute', 1)} --q-lora-rank 20 {_UNTIED} "
        "--apply-wd-to-qk-layernorm --weight-decay 0.1"
    ),
    "latents, packed": (
        f"--num-layers 4 {_LATENT_SIZES} --q-lora-rank 20 {_UNTIED} --reset-position-ids --reset-attention-mask"
    ),
}

# Keys chosen by an indexer, fewer than a document has; more heads than make a score of 0 for many keys at once. With 12
# channels a head, one of the 262,144 products before ReLU is 1.2e-7 in one process and -0.8e-7 on TP2 in fp32 (their
# median is 1), and a gradient of that layer differs by 2.8e-5; in fp64 all differ by 3e-15 at most
# (tests/distributed/test_chosen_keys.py). With 10 channels there is no such product.
_INDEXER_SIZES = (
    "--q-lora-rank 20 --experimental-attention-variant dsa --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 12 "
    "--dsa-indexer-topk 12"
)
_NO_SUCH_PRODUCT = _INDEXER_SIZES.replace("head-dim 12", "head-dim 10")
MODELS |= {
    "chosen keys": f"--num-layers 4 {_LATENT_SIZES} {_NO_SUCH_PRODUCT} {_UNTIED}",
    "chosen keys, packed": f"{MODELS['latents, packed'].replace('--q-lora-rank 20', _INDEXER_SIZES)} "
    "--dsa-indexer-use-sparse-loss",
    "a token ahead by chosen keys": f"--num-layers 4 {_LATENT_SIZES} {_NO_SUCH_PRODUCT} --mtp-num-layers 1",
}

# Gated delta rules in every other layer, whose value heads share key heads in twos; and as Qwen3-Next has them. What a
# head reads is near zero where its query and key are nearly at right angles; the norm divides by that, and with an
# epsilon of 1e-5 such tokens make fp32 gradients differ from fp64 gradients by 1e-5 in one process.
_DELTA_SIZES = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 12 "
    "--linear-value-head-dim 10 --linear-num-key-heads 4 --linear-num-value-heads 8 --norm-epsilon 1e-3"
)
MODELS |= {
    "delta rules": f"--num-layers 4 {_LLAMA} {_UNTIED} {_DELTA_SIZES}",
    "delta rules with LayerNorm": (
        f"--num-layers 4 {_LLAMA.replace('--normalization RMSNorm ', '')} {_UNTIED} {_DELTA_SIZES}"
    ),
    "delta rules, packed": f"{MODELS['packed']} {_DELTA_SIZES}",
    "Kimi delta rules": f"--num-layers 4 {_LLAMA} {_UNTIED} {_DELTA_SIZES.replace('gated_delta_net', 'kda')}",
    "Kimi delta rules, packed": f"{MODELS['packed']} {_DELTA_SIZES.replace('gated_delta_net', 'kda')}",
    "Qwen3-Next": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} {_DELTA_SIZES} --attention-output-gate --qk-layernorm --rotary-percent 0.5 "
        "--num-experts 8 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate "
        "--moe-aux-loss-coeff 0.1"
    ),
    "Kimi Linear": (
        f"--num-layers 4 {_LATENT_SIZES.replace('type rope', 'type none')} {_UNTIED} "
        f"{_DELTA_SIZES.replace('gated_delta_net', 'kda')} --num-experts 8 --moe-ffn-hidden-size 48 "
        "--moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 48 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-dtype fp32"
    ),
    "OLMo hybrid": (
        f"{MODELS['OLMo-2'].replace('position after', 'position after-attention')} {_DELTA_SIZES} "
        "--linear-allow-neg-eigval --linear-norm-epsilon 1e-2"
    ),
}
# Layers of one thing alone: Mamba-2, attention without positions, an MLP, a gated delta rule, experts.
_HYBRID = (
    f"{_LLAMA.replace('--position-embedding-type rope', '--position-embedding-type none')} {_UNTIED} "
    "--mamba-state-dim 12 --mamba-head-dim 10 --mamba-num-groups 4 --mamba-num-heads 8 --norm-epsilon 1e-3"
)
# Attention and Mamba-2 side by side, each product with factors.
_FALCON_H1 = (
    f"{_HYBRID.replace('type none', 'type rope')} --hybrid-layer-pattern B-B- --mamba-norm none --softmax-scale 0.4 "
    "--mamba-multipliers 0.6 1.4 0.8 1.2 0.9 --mixer-multipliers 0.7 1.3 --mlp-multipliers 0.9 0.6"
)
MODELS |= {
    "Mamba-2 hybrid": f"{_HYBRID} --hybrid-layer-pattern M-M*",
    "Mamba-2 hybrid, packed": f"{_HYBRID} --hybrid-layer-pattern M-M* --reset-position-ids --reset-attention-mask",
    "Falcon-H1": _FALCON_H1,
    "Falcon-H1, packed": f"{_FALCON_H1} --mamba-norm before-gate --reset-position-ids --reset-attention-mask",
    "Mamba-2 hybrid with experts": (
        f"{_HYBRID} --hybrid-layer-pattern MEM*GEM- --num-experts 8 --moe-ffn-hidden-size 48 "
        "--moe-shared-expert-intermediate-size 40 --moe-aux-loss-coeff 0.1 --linear-key-head-dim 12 "
        "--linear-value-head-dim 10 --linear-num-key-heads 4 --linear-num-value-heads 8"
    ),
}

# Muon with updates as large as Adam's.
_MUON = "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2"
MODELS |= {
    f"{model}, Muon": f"{MODELS[model]} {_MUON}" for model in ("untied", "sinks and gates", "experts", "latents")
}
# Thresholds that some heads exceed in every step, and others not.
MODELS |= {
    "clipped products": f"{MODELS['untied, Muon']} --qk-clip --qk-clip-threshold 2.4 --qk-clip-alpha 0.3",
    "clipped latents": f"{MODELS['latents, Muon'].replace('--qk-layernorm ', '')} --qk-clip --qk-clip-threshold 1.1",
    "clipped products by Adam": f"{MODELS['packed']} --attention-output-gate --qk-clip --qk-clip-threshold 2.4",
}
# Factors of rates, initial weights and multipliers; and other optimizers.
_MUP = "--use-mup --mup-base-hidden-size 16 --mup-base-num-layers 2 --lr-group decoder.layers.1.*=0.5"
MODELS |= {
    "untied, muP": f"{MODELS['untied']} {_MUP}",
    "untied, AdEMAMix": f"{MODELS['untied']} --optimizer ademamix --ademamix-beta3 0.99 --ademamix-warmup 10",
    "untied, schedule-free": f"{MODELS['untied']} --optimizer schedule_free",
    "untied, AdaptiveMuon": f"{MODELS['untied']} --optimizer adaptive_muon --muon-scale-mode unit_rms_norm",
    "untied, NorMuon": f"{MODELS['untied, Muon']} --optimizer adaptive_muon --adaptive-muon-moment2-method normuon",
}
_ADAFACTOR = "--optimizer adafactor --lr-group decoder.layers.*.weight=10"
MODELS |= {f"{model}, Adafactor": f"{MODELS[model]} {_ADAFACTOR}" for model in ("untied", "experts")}
MODELS |= {
    "one token ahead": f"--num-layers 4 {_LLAMA} --mtp-num-layers 1",
    "two tokens ahead": f"--num-layers 4 {_LLAMA} {_UNTIED} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5",
    "two tokens ahead, packed": f"{MODELS['packed']} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5",
    "a token ahead by latents and experts": (
        f"--num-layers 4 {_LATENT_SIZES} --num-experts 8 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.1 "
        "--moe-layer-freq [0,1,1,1] --mtp-num-layers 1"
    ),
    # One layer for all depths.
    "two tokens ahead by one layer": (
        f"--num-layers 4 {_LLAMA} {_UNTIED} --mtp-num-layers 2 --mtp-use-repeated-layer --mtp-loss-scaling-factor 0.5"
    ),
    "three tokens ahead by one layer, tied": f"--num-layers 4 {_LLAMA} --mtp-num-layers 3 --mtp-use-repeated-layer",
    "two tokens ahead by one layer of experts": (
        f"--num-layers 4 {_LATENT_SIZES} --num-experts 8 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.1 "
        "--moe-z-loss-coeff 0.01 --moe-layer-freq [0,1,1,1] --mtp-num-layers 2 --mtp-use-repeated-layer"
    ),
    # Nemotron 3's depths, each of two layers, after four of three kinds; and tied, each of one.
    "hybrid, two tokens ahead": (
        f"{_HYBRID} --hybrid-layer-pattern ME*M/*E/*E --num-experts 8 --moe-ffn-hidden-size 48 "
        "--moe-shared-expert-intermediate-size 40 --moe-aux-loss-coeff 0.1 --mtp-loss-scaling-factor 0.5"
    ),
    "hybrid, two tokens ahead by layers of one depth": (
        f"{_HYBRID} --hybrid-layer-pattern ME*M/*E/*E --num-experts 8 --moe-ffn-hidden-size 48 "
        "--moe-aux-loss-coeff 0.1 --mtp-use-repeated-layer"
    ),
    "tied hybrid, a token ahead": f"{_HYBRID.replace(_UNTIED, '')} --hybrid-layer-pattern M-M*/M-*",
    "tied hybrid, a token ahead, packed": (
        f"{_HYBRID.replace(_UNTIED, '')} --hybrid-layer-pattern M-M*/M-* --reset-position-ids --reset-attention-mask"
    ),
}
MODELS |= {name: flags for compared in brought("comparisons") for name, flags in compared.models.items()}
