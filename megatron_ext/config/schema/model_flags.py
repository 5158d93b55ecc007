"""The options of the model: its shape, its parts, and how its weights begin."""

import math
from dataclasses import dataclass

from megatron_ext.config.schema.option import Need, ReadWith, option

_NO_BIASES = ReadWith("disable_bias_linear", "without --disable-bias-linear every linear layer has a bias")

_EXPERTS = ReadWith("num_experts", "without --num-experts there are no experts")
_ROTARY = ReadWith(
    "position_embedding_type",
    "there are no rotary positions",
    but=("learned_absolute", "none", "alibi", None),
)
_SCALED = ReadWith("use_rope_scaling", "without --use-rope-scaling rotary positions are not scaled")

_MUP = ReadWith("use_mup", "without --use-mup weights begin and learn at the same rate in any width")
_YARN = ReadWith(
    ("rope_type", "position_embedding_type"),
    "without --rope-type it stretches nothing",
    only=("yarn", "longrope", "dynamic"),
)
_STRETCHED = [
    Need("position_embedding_type", "rope", "rotary positions"),
    Need("use_rope_scaling", False, "one stretch of the context"),
    Need("rotary_seq_len_interpolation_factor", 1.0, "one stretch of the context"),
]


@dataclass(frozen=True)
class ModelConfig:
    """Options of the model, a GPT decoder. Sizes are of the whole model, never of one rank."""

    num_layers: int = option(
        None, "Number of transformer layers.", resume="shape", required="12", at_least=1, at_most=10_000
    )
    hidden_size: int = option(None, "Width of the residual stream.", resume="shape", required="768", at_least=1)
    ffn_hidden_size: int = option(
        None,
        "Width inside the MLP; default 4 x hidden size, or 2/3 of that rounded to 64 with a gate.",
        resume="shape",
        at_least=1,
    )
    num_attention_heads: int = option(None, "Number of attention heads.", resume="shape", required="12", at_least=1)
    kv_channels: int = option(None, "Size of one head; default hidden size / heads.", resume="shape", at_least=1)
    group_query_attention: bool = option(
        False, "Share each key and value head between several query heads.", resume="shape"
    )
    num_query_groups: int = option(
        None,
        "Number of key/value heads with --group-query-attention; without that switch, the number of heads.",
        resume="shape",
        at_least=1,
    )
    num_query_groups_local: int | None = option(
        None,
        "Number of key/value heads in layers with a window; default: as many as in the others.",
        resume="shape",
        at_least=1,
    )
    value_channels: int | None = option(
        None, "Size of one value head; default that of a query and key head.", resume="shape", at_least=1
    )
    value_multiplier: float = option(1.0, "Factor of attention's values.", resume="function", positive=True)
    seq_length: int = option(None, "Tokens in one training sample.", resume="free", required="1024", at_least=1)
    max_position_embeddings: int = option(
        None,
        "Rows of the learned position table (at least the sequence length); default the sequence length.",
        resume="shape",
        at_least=1,
    )
    position_embedding_offset: int = option(
        0,
        "Rows of the learned position table, besides --max-position-embeddings, before the first position's: 2 in OPT.",
        resume="shape",
        at_least=0,
        read_with=ReadWith(
            "position_embedding_type", "there are no learned positions", only=("learned_absolute", None)
        ),
    )
    position_embedding_type: str = option(
        "learned_absolute",
        "How positions enter the model; yarn is rope with --rope-type yarn.",
        resume="shape",
        choices=("learned_absolute", "rope", "yarn", "alibi", "none"),
        refused={"mrope": "axes of images are not in this version, and a text has the same position on all: use rope"},
    )
    no_position_embedding: bool = option(
        False,
        "An old spelling, taken as Megatron takes it: nothing with --position-embedding-type rope, else refused.",
        resume="free",
    )
    rotary_base: float = option(
        10000.0, "Base of the rotary frequencies (theta).", resume="function", positive=True, read_with=_ROTARY
    )
    rotary_base_local: float | None = option(
        None,
        "That of layers with a window, whose frequencies are then not stretched; default: they rotate as the others.",
        resume="function",
        positive=True,
    )
    rotary_percent: float = option(
        1.0, "Share of each head's channels that is rotated.", resume="function", read_with=_ROTARY
    )
    rotary_interleaved: bool = option(
        False,
        "Rotate neighbouring channels (2i, 2i + 1) together, as GPT-J does, instead of i and i + half.",
        resume="function",
        needs={True: [Need("position_embedding_type", "rope", "rotary positions")]},
        read_with=_ROTARY,
    )
    rotary_seq_len_interpolation_factor: float = option(
        1.0,
        "What positions are divided by before they give angles of rotation: how far the context is stretched.",
        resume="function",
        positive=True,
        read_with=_ROTARY,
    )
    window_size: str | None = option(
        None,
        "Positions before and after its own that a query sees in layers with a window, such as 4095,0, which are 4,096 "
        "with its own; the second is 0. -1,0 is no limit.",
        resume="function",
        metavar="LEFT,RIGHT",
    )
    window_attn_skip_freq: str | None = option(
        None,
        "Which layers have the window of --window-size; default all. N: N - 1 layers with it and one without, in turn; "
        "a list such as [1,1,1,0]*6: those with a 1.",
        resume="function",
        metavar="N|LIST",
    )
    no_rope_freq: str | None = option(
        None,
        "Which layers rotate nothing, with --position-embedding-type rope; default none. N: every N-th layer; a list "
        "such as [0,0,0,1]*6: those with a 1.",
        resume="function",
        metavar="N|LIST",
    )
    use_rope_scaling: bool = option(
        False,
        "Stretch the rotary frequencies as Llama 3.1 does.",
        resume="function",
        needs={
            True: [
                Need("position_embedding_type", "rope", "rotary positions"),
                Need("rotary_seq_len_interpolation_factor", 1.0, "one stretch of the context"),
            ]
        },
    )
    rope_scaling_factor: float = option(
        8.0,
        "How far the context is stretched with --use-rope-scaling.",
        resume="function",
        positive=True,
        read_with=_SCALED,
    )
    rope_scaling_low_freq_factor: float = option(
        1.0,
        "Wavelengths above original length / this are stretched in full.",
        resume="function",
        positive=True,
        read_with=_SCALED,
    )
    rope_scaling_high_freq_factor: float = option(
        4.0,
        "Wavelengths below original length / this are left alone.",
        resume="function",
        read_with=_SCALED,
    )
    rope_scaling_original_max_position_embeddings: int = option(
        8192,
        "Context length that the model had before the stretch.",
        resume="function",
        at_least=1,
        read_with=_SCALED,
    )
    experimental_attention_variant: str | None = option(
        None,
        "What takes the place of attention in the layers of --linear-attention-freq, a recurrence over a state of one "
        "size: Gated DeltaNet, or Kimi Delta Attention (kda); or dsa: in all layers latent attention over the keys "
        "that an indexer chooses, which torch's operations gather for a block of queries at a time, on GPUs too.",
        resume="shape",
        choices=(),
        computed_by_ours=True,
    )
    hybrid_layer_pattern: str | None = option(
        None,
        "What each layer is, alone: * attention, - MLP, E experts, {choices}. | ends a chunk of the pipeline. A layer "
        "has one norm and adds once, and there are as many as letters.",
        resume="shape",
        metavar="LETTERS",
        aliases=("--hybrid-override-pattern",),
        computed_by_ours=True,
    )
    rope_type: str | None = option(
        None,
        "How rotary frequencies are stretched: not at all, by YaRN, by factors of pairs of channels (longrope), or "
        "by a larger base (dynamic), both by --seq-length; default yarn with --multi-latent-attention, else rope.",
        resume="function",
        choices=("rope", "yarn", "longrope", "dynamic"),
        needs=dict.fromkeys(("yarn", "longrope", "dynamic"), _STRETCHED),
    )
    rotary_scaling_factor: float = option(
        1.0,
        "How far --rope-type stretches the context.",
        resume="function",
        at_least=1,
        read_with=_YARN,
        dropped_unread=True,
    )
    original_max_position_embeddings: int = option(
        4096,
        "Context length that the model had before that.",
        resume="function",
        at_least=1,
        read_with=_YARN,
        dropped_unread=True,
    )
    rotary_attention_factor: float | None = option(
        None,
        "What rotated queries and keys are multiplied by with --rope-type yarn and longrope; default as these were "
        "published, by --mscale or by the logarithm of the factor.",
        resume="function",
        positive=True,
        read_with=_YARN,
        dropped_unread=True,
    )
    longrope_short_factor: tuple[float, ...] | None = option(
        None,
        "By how much --rope-type longrope stretches each pair of channels, where --seq-length is no longer than "
        "--original-max-position-embeddings.",
        resume="function",
        read_with=_YARN,
        dropped_unread=True,
    )
    longrope_long_factor: tuple[float, ...] | None = option(
        None, "The same where --seq-length is longer.", resume="function", read_with=_YARN, dropped_unread=True
    )
    beta_fast: float = option(
        32.0,
        "Channels that turn more often than this in that context are left alone by YaRN.",
        resume="function",
        positive=True,
        read_with=_YARN,
        dropped_unread=True,
    )
    beta_slow: float = option(
        1.0,
        "Channels that turn less often than this are stretched in full by YaRN.",
        resume="function",
        positive=True,
        read_with=_YARN,
        dropped_unread=True,
    )
    no_yarn_correction_range_round_to_int: bool = option(
        False,
        "Do not round the indices of the channels that turn so often outwards.",
        resume="function",
        read_with=_YARN,
        dropped_unread=True,
    )
    mscale: float = option(
        1.0,
        "How much YaRN lengthens rotated channels: 0.1 x this x ln(factor) + 1.",
        resume="function",
        at_least=0,
        read_with=_YARN,
        dropped_unread=True,
    )
    mscale_all_dim: float = option(
        0.0,
        "How much of that goes to the scores of all channels instead, by its square.",
        resume="function",
        at_least=0,
        read_with=_YARN,
        dropped_unread=True,
    )
    swiglu: bool = option(False, "SwiGLU activation in the MLP (gate x SiLU).", resume="shape")
    geglu: bool = option(
        False, "GeGLU activation in the MLP (gate x GELU), with --openai-gelu in its tanh form.", resume="shape"
    )
    quick_geglu: bool = option(
        False, "GeGLU in the MLP whose GELU is approximated by x sigmoid(1.702 x), as GPT-OSS has it.", resume="shape"
    )
    activation_func_clamp_value: float | None = option(
        None,
        "Largest value in the MLP's gate, before its activation, and largest size of what it multiplies; default none.",
        resume="function",
        positive=True,
    )
    glu_linear_offset: float = option(
        0.0, "What is added to what the MLP's gate multiplies, as GPT-OSS has it.", resume="function"
    )
    xielu: bool = option(
        False,
        "xIELU activation in the MLP, without a gate, whose two numbers each layer learns (arXiv:2411.13010).",
        resume="shape",
        needs={True: [Need("transformer_impl", "local", "layers of this program's own")]},
    )
    relu: bool = option(False, "ReLU activation in the MLP, without a gate.", resume="function")
    squared_relu: bool = option(False, "Squared ReLU activation in the MLP.", resume="function")
    openai_gelu: bool = option(False, "The tanh form of GELU, as GPT-2 has it.", resume="function")
    normalization: str = option("LayerNorm", "Kind of norm.", resume="shape", choices=("LayerNorm", "RMSNorm"))
    norm_parameters: str = option(
        "all",
        "What norms have of their own: a weight and, in LayerNorm, a bias (all); a weight alone; or nothing.",
        resume="shape",
        choices=("all", "weight", "none"),
        needs={
            fewer: [
                *([Need("normalization", "LayerNorm", "LayerNorm")] if fewer == "weight" else []),
                Need("norm_position", "before", "norms before attention and MLP"),
                Need("transformer_impl", "local", "layers of this program's own"),
            ]
            for fewer in ("weight", "none")
        },
    )
    norm_position: str = option(
        "before",
        "Whether norms stand before attention and MLP, after them, on what they add to the residual stream, or both; "
        "after-attention: after them in layers with attention, before them in the others; after-experts: before them, "
        "and after experts.",
        resume="shape",
        choices=("before", "after", "both", "after-attention", "after-experts"),
    )
    parallel_residual: str = option(
        "none",
        "Attention and MLP read the same residual stream, through one norm (GPT-J, Falcon 7B, Command R) or each "
        "through its own (GPT-NeoX, Falcon 40B); with none the MLP reads what attention has added to.",
        resume="shape",
        choices=("none", "one-norm", "two-norms"),
        needs={
            norms: [
                Need("norm_position", "before", "norms before attention and MLP"),
                Need("num_experts", None, "an MLP"),
                Need("residual_multiplier", 1.0, "what both add as it is"),
            ]
            for norms in ("one-norm", "two-norms")
        },
    )
    norm_epsilon: float = option(1e-5, "Epsilon inside the norms.", resume="function", positive=True)
    embed_layernorm: bool = option(
        False,
        "Normalize the word embeddings before the first layer, as BLOOM does.",
        resume="shape",
        needs={True: [Need("transformer_impl", "local", "norms of this program's own")]},
    )
    embedding_multiplier: float = option(
        1.0, "Factor of the word embeddings that enter the layers.", resume="function", positive=True
    )
    residual_multiplier: float = option(
        1.0, "Factor of what attention and MLP add to the residual stream.", resume="function", positive=True
    )
    mlp_multipliers: tuple[float, ...] | None = option(
        None,
        "Factors of the gate of SwiGLU, before its activation, and of what the MLP gives; default 1.",
        resume="function",
    )
    logits_multiplier: float = option(1.0, "Factor of the logits.", resume="function", positive=True)
    softmax_scale: float | None = option(
        None,
        "Factor of the products of queries and keys; default 1 / the square root of the head size.",
        resume="function",
        positive=True,
    )
    softmax_type: str = option(
        "vanilla",
        "What attention's softmax sums over besides the keys: nothing, one more key with the score 0 and no value, or "
        "with a score that each head learns.",
        resume="shape",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    softmax_type_local: str | None = option(
        None,
        "That of layers with a window; default: as in the others.",
        resume="shape",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    attention_logit_softcapping: float | None = option(
        None,
        "Bound c of attention's scores, as c tanh(scores / c), as Gemma 2 has it; default none.",
        resume="function",
        positive=True,
    )
    final_logit_softcapping: float | None = option(
        None, "Bound c of the logits, as c tanh(logits / c); default none.", resume="function", positive=True
    )
    attention_output_gate: bool = option(
        False,
        "Multiply what attention gives by the sigmoid of as many channels more of the QKV projection.",
        resume="shape",
    )
    attention_output_gate_over: str = option(
        "channel",
        "What each of these channels multiplies: a channel, or a whole head, as Step-3.5 has it; they are then as many "
        "as heads.",
        resume="shape",
        choices=("channel", "head"),
        needs={"head": [Need("attention_output_gate", True, "gates of what attention gives")]},
    )
    qkv_clip: float | None = option(
        None,
        "Largest size of each number in queries, keys and values, as OLMo and DBRX have it; default no limit.",
        resume="function",
        positive=True,
    )
    attention_temperature_scale: float | None = option(
        None,
        "Multiply queries by 1 + this x ln(1 + floor(position / --attention-temperature-step)); default they stay.",
        resume="function",
        positive=True,
    )
    attention_temperature_step: float = option(
        8192.0,
        "Positions in which that factor stays as it is.",
        resume="function",
        positive=True,
        read_with=ReadWith(
            "attention_temperature_scale", "without --attention-temperature-scale queries stay as they are"
        ),
        dropped_unread=True,
    )
    attention_temperature_of: str = option(
        "fixed",
        "Which layers do so: those that rotate nothing (--no-rope-freq), positions counted from 1, as in Llama 4; or "
        "those that rotate, counted from 0, as in Ministral 3.",
        resume="function",
        choices=("fixed", "rotated"),
        needs={"rotated": [Need("position_embedding_type", "rope", "rotary positions")]},
        read_with=ReadWith(
            "attention_temperature_scale", "without --attention-temperature-scale queries stay as they are"
        ),
        dropped_unread=True,
    )
    attention_chunk_size: int | None = option(
        None,
        "Length of the chunks within which layers that rotate see each other in a longer sequence, as Llama 4 has it; "
        "such sequences are refused. Default none.",
        resume="function",
        at_least=1,
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "Give the output layer its own matrix instead of the word embeddings'.", resume="shape"
    )
    z_loss_strength: float = option(
        0.0,
        "Factor of the square of the log of the softmax's normalizer in the loss of each token, training's and "
        "validation's, which keeps logits small; PaLM's is 1e-4.",
        resume="free",
        at_least=0,
    )
    lm_head_bias: bool = option(
        False,
        "A bias of the logits, as Phi has it.",
        resume="shape",
        needs={
            True: [
                Need("linear_cross_entropy", False, "logits that are kept"),
                Need("logits_multiplier", 1.0, "logits as they are"),
            ]
        },
    )
    disable_bias_linear: bool = option(False, "No biases in the linear layers.", resume="shape")
    add_qkv_bias: bool = option(
        False, "A bias in the QKV projection even with --disable-bias-linear.", resume="shape", read_with=_NO_BIASES
    )
    add_output_bias: bool = option(
        False,
        "A bias in attention's output projection even with --disable-bias-linear.",
        resume="shape",
        needs={True: [Need("transformer_impl", "local", "layers of this program's own")]},
        read_with=_NO_BIASES,
    )
    add_mlp_bias: bool = option(
        False,
        "Biases in the MLP even with --disable-bias-linear.",
        resume="shape",
        needs={True: [Need("transformer_impl", "local", "layers of this program's own")]},
        read_with=_NO_BIASES,
    )
    qk_layernorm: bool = option(False, "Normalize queries and keys.", resume="shape")
    qk_l2_norm: bool = option(
        False,
        "Divide queries and keys that are rotated by their root mean square, as Llama 4 does: --qk-layernorm without "
        "weights.",
        resume="function",
        needs={
            True: [
                Need("qk_layernorm", False, "no other norms of queries and keys"),
                Need("position_embedding_type", "rope", "rotary positions"),
                Need("transformer_impl", "local", "layers of this program's own"),
            ]
        },
    )
    qk_layernorm_over: str = option(
        "head",
        "What --qk-layernorm normalizes: each head, with the weights of all or with its own (each-head), as Command R+ "
        "does, or all heads of a token at once, as OLMo-2 does.",
        resume="shape",
        choices=("head", "each-head", "projection"),
        needs={
            "each-head": [Need("qk_layernorm", True, "norms of queries and keys")],
            "projection": [
                Need("qk_layernorm", True, "norms of queries and keys"),
                Need("normalization", "RMSNorm", "RMSNorm"),
            ],
        },
    )
    qk_layernorm_place: str = option(
        "before",
        "Whether --qk-layernorm normalizes queries and keys before they are rotated, or after it, as Hunyuan does.",
        resume="function",
        choices=("before", "after"),
        needs={
            "after": [
                Need("qk_layernorm", True, "norms of queries and keys"),
                Need("norm_parameters", "all", "norms with all of their parameters"),
                Need("qk_layernorm_over", "head", "norms of single heads"),
                Need("position_embedding_type", "rope", "rotary positions"),
                Need("transformer_impl", "local", "layers of this program's own"),
            ]
        },
    )
    mtp_num_layers: int | None = option(
        None,
        "Depths of multi-token prediction, a layer for each further token.",
        resume="shape",
        at_least=0,
        at_most=100,
        turns_on_a_plugin=True,
        computed_by_ours=True,
    )
    mtp_loss_scaling_factor: float = option(
        0.1,
        "Weight in the total loss of the mean of the losses of --mtp-num-layers.",
        resume="free",
        read_with=ReadWith("mtp_num_layers", "without --mtp-num-layers one token is predicted"),
    )
    num_experts: int | None = option(
        None,
        "Replace each layer's MLP by a mixture of this many experts.",
        resume="shape",
        at_least=1,
        at_most=65_536,
        computed_by_ours=True,
    )
    moe_layer_freq: str | None = option(
        None,
        "Which layers have experts, the others an MLP; default all. N: one of N layers, the first; a list such as "
        "[0]*3+[1]*58: those with a 1.",
        resume="shape",
        metavar="N|LIST",
    )
    moe_ffn_hidden_size: int | None = option(
        None, "Width inside each expert; default the width of the MLP that they replace.", resume="shape", at_least=1
    )
    moe_latent_size: int | None = option(
        None,
        "Width of what routed experts read and give, between a projection of all of them down and one up; default "
        "--hidden-size.",
        resume="shape",
        at_least=1,
    )
    moe_router_topk: int = option(
        2, "Experts that compute each token.", resume="function", at_least=1, read_with=_EXPERTS
    )
    moe_router_score_function: str = option(
        "softmax",
        "What turns the router's logits into scores; but for softmax, those of a token's experts are divided by their "
        "sum.",
        resume="function",
        choices=("softmax", "sigmoid", "sqrtsoftplus"),
        read_with=_EXPERTS,
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "Choose experts by scores with a bias added, which weighs nothing and after each step moves towards experts "
        "that had fewer tokens of the global batch than the mean.",
        resume="shape",
    )
    moe_router_bias_of: str = option(
        "scores",
        "Numbers to which the bias of --moe-router-enable-expert-bias is added: the scores, or the router's logits.",
        resume="function",
        choices=("scores", "logits"),
        read_with=ReadWith("moe_router_enable_expert_bias", "without --moe-router-enable-expert-bias there is no bias"),
    )
    moe_router_bias_update_rate: float = option(
        1e-3,
        "How far a step moves the bias of an expert.",
        resume="free",
        at_least=0,
        read_with=ReadWith("moe_router_enable_expert_bias", "without --moe-router-enable-expert-bias there is no bias"),
    )
    moe_router_num_groups: int | None = option(
        None, "Groups of neighbouring experts, of which a token goes to a few.", resume="function", at_least=1
    )
    moe_router_group_topk: int | None = option(
        None, "Groups from which the experts of a token are chosen.", resume="function", at_least=1
    )
    moe_router_group_scores: int | None = option(
        None,
        "Best scores in a group whose sum is the group's; default --moe-router-topk / --moe-router-group-topk.",
        resume="function",
        at_least=1,
    )
    moe_router_topk_scaling_factor: float | None = option(
        None, "Multiply the weights of a token's experts.", resume="function", positive=True
    )
    moe_router_pre_softmax: bool = option(
        False,
        "Softmax over all experts and then the top k, instead of over the top k alone.",
        resume="function",
        read_with=(
            _EXPERTS,
            ReadWith("moe_router_score_function", "the scores of experts are no softmax", only=("softmax",)),
        ),
        dropped_unread=True,
    )
    moe_router_unnormalized: bool = option(
        False,
        "Weigh the experts of a token by their scores as they are, and not divided by their sum.",
        resume="function",
        read_with=(
            _EXPERTS,
            ReadWith("moe_router_score_function", "a softmax is whole", only=("sigmoid", "sqrtsoftplus")),
        ),
        dropped_unread=True,
    )
    moe_apply_probs_on_input: bool = option(
        False,
        "Multiply the input of a token's one expert by its weight, not what is inside it.",
        resume="function",
        needs={True: [Need("moe_router_topk", 1, "one expert for each token")]},
        read_with=_EXPERTS,
    )
    moe_router_sparsemixer_eps: float | None = option(
        None,
        "Choose two experts of a token one after the other by SparseMixer-v2, as Phi-3.5-MoE does: in training at "
        "random among those whose logits are within 2 eps of the largest, relative to it; default the top k.",
        resume="function",
        positive=True,
    )
    moe_router_dtype: str | None = option(
        None,
        "Precision of the router's logits; default that of the weights.",
        resume="function",
        choices=("fp32", "fp64"),
        read_with=_EXPERTS,
    )
    moe_router_load_balancing_type: tuple[str, ...] | None = option(
        None,
        "What spreads tokens over experts: auxiliary losses of each microbatch (the default), of each sample or of "
        "the global batch so far, Sinkhorn's assignment of each microbatch, or nothing.",
        resume="free",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        read_with=_EXPERTS,
    )
    moe_aux_loss_coeff: tuple[float, ...] | None = option(
        None, "Weight of the load-balancing loss, or of each of several, in the total loss; default 0.", resume="free"
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "Most tokens of a microbatch that an expert takes in training, over those of an even load; the others pass it "
        "by. Default no limit.",
        resume="free",
        positive=True,
    )
    moe_token_drop_policy: str = option(
        "probs",
        "Which tokens an expert takes by --moe-expert-capacity-factor: those of the greatest weight, or the first.",
        resume="free",
        choices=("probs", "position"),
        read_with=ReadWith(
            "moe_expert_capacity_factor", "without --moe-expert-capacity-factor an expert takes all of its tokens"
        ),
    )
    moe_input_jitter_eps: float | None = option(
        None,
        "Multiply what a router reads in training by random numbers between 1 - eps and 1 + eps.",
        resume="free",
        positive=True,
    )
    moe_router_force_load_balancing: bool = option(
        False, "For benchmarks: experts are chosen at random, so that all have the same load.", resume="free"
    )
    moe_z_loss_coeff: float | None = option(
        None, "Weight of the router's z-loss, which keeps its logits small, in the total loss.", resume="free"
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "Width of the shared experts together, which compute every token beside the routed ones; default none.",
        resume="shape",
        at_least=1,
    )
    moe_shared_expert_gate: bool = option(
        False, "Multiply the output of the shared experts by a sigmoid gate of each token.", resume="shape"
    )
    moe_grouped_gemm: bool = option(
        False,
        "Multiply by all experts of a rank in one grouped product (bf16), not by one after another.",
        resume="free",
        read_with=_EXPERTS,
        dropped_unread=True,
    )
    init_method_std: float = option(0.02, "Standard deviation of the initial weights.", resume="free", at_least=0)
    embedding_init_method_std: float | None = option(
        None, "Standard deviation of the initial embeddings; default --init-method-std.", resume="free", at_least=0
    )
    init_method_xavier_uniform: bool = option(
        False,
        "Draw initial matrices uniformly up to the square root of 6 / (inputs + outputs), not normally.",
        resume="free",
    )
    use_mup: bool = option(
        False,
        "Begin and update weights such that the best learning rate stays as the model gets wider (maximal update "
        "parametrization).",
        resume="function",
        needs={
            True: [
                Need("init_method_xavier_uniform", False, "normal initial weights"),
            ]
        },
    )
    mup_base_hidden_size: int | None = option(
        None,
        "Hidden size of the model that the learning rate was chosen on; default --hidden-size.",
        resume="function",
        at_least=1,
        read_with=_MUP,
    )
    mup_embedding_mult: float = option(
        1.0, "With --use-mup, the --embedding-multiplier.", resume="function", positive=True, read_with=_MUP
    )
    mup_output_mult: float = option(
        1.0,
        "With --use-mup, the --logits-multiplier; 1 stands for the base's hidden size over the model's.",
        resume="function",
        positive=True,
        read_with=_MUP,
    )
    mup_base_head_dim: float | None = option(
        None,
        "With --use-mup, the head size for which attention's scale is 1 / its square root; default 1.",
        resume="function",
        positive=True,
        read_with=_MUP,
    )
    mup_attn_scale_power: float = option(
        1.0,
        "With --use-mup, attention's scale falls with the head size by this power.",
        resume="function",
        at_least=0,
        read_with=_MUP,
    )
    mup_base_num_layers: int | None = option(
        None,
        "With --use-mup, the layers of the model that the learning rate was chosen on: it stays as the model gets "
        "deeper, too (CompleteP); default the depth changes nothing.",
        resume="function",
        at_least=1,
        read_with=_MUP,
    )
    attention_dropout: float = option(0.1, "Dropout probability of the attention weights.", resume="free", share=True)
    hidden_dropout: float = option(
        0.1, "Dropout probability of embeddings and residual branches.", resume="free", share=True
    )
    make_vocab_size_divisible_by: int = option(
        128, "The vocabulary is padded to a multiple of this times the tensor-parallel size.", resume="free", at_least=1
    )
    transformer_impl: str = option(
        "local",
        "Who computes the layers: ours on plain torch, or Transformer Engine where it is installed.",
        resume="free",
        choices=("local", "transformer_engine"),
        packages={"transformer_engine": "transformer_engine"},
        needs_gpu=("transformer_engine",),
        untried_with_graphs=True,
    )
    external_kernels: str = option(
        "none",
        "Package that megatron-core takes Adam, SGD, gradient norm and clipping from; none: torch's, whatever is "
        "installed. --transformer-impl transformer_engine takes Transformer Engine's.",
        resume="free",
        choices=("none", "apex", "transformer_engine"),
    )
    padded_vocab_size: int = option(
        None,
        "Rows of the embedding after padding. Derived; give it only to pin it across layouts.",
        resume="free",
        at_least=1,
    )

    @property
    def mup_width_mult(self) -> float:
        """Hidden size over --mup-base-hidden-size, the width for which --use-mup takes the learning rate; 1 without."""
        return self.hidden_size / self.mup_base_hidden_size if self.use_mup and self.mup_base_hidden_size else 1.0

    @property
    def matrix_std(self) -> float:
        """Standard deviation of the initial matrices of layers that do not add to the residual stream."""
        return self.init_method_std / math.sqrt(self.mup_width_mult)

    @property
    def num_key_value_heads(self) -> int:
        """Number of key/value heads: the query groups with grouped-query attention, else one per attention head."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def key_value_heads(self) -> dict[str, int]:
        """The flags that set the number of key/value heads, each with its number: for all layers, or for layers without
        and with a window."""
        flag = "--num-query-groups" if self.group_query_attention else "--num-attention-heads"
        local = {"--num-query-groups-local": self.num_query_groups_local} if self.num_query_groups_local else {}
        return {flag: self.num_key_value_heads, **local}

    @property
    def softmax_types(self) -> set[str]:
        """Types of softmax (terms of its sum besides the keys), of layers without and with a window."""
        return {self.softmax_type, self.softmax_type_local or self.softmax_type}

    @property
    def shares_word_embeddings(self) -> bool:
        """Whether the last pipeline stage has a copy of the word embeddings: as its output layer, or for the depths of
        multi-token prediction."""
        return not self.untie_embeddings_and_output_weights or bool(self.mtp_num_layers)

    @property
    def gated_linear_unit(self) -> bool:
        """Whether the MLP has a gate."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Width inside each expert; by default the width of the MLP that the experts replace."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def load_balancing(self) -> tuple[str, ...]:
        """Methods that balance tokens over experts; by default the auxiliary loss of each microbatch."""
        return self.moe_router_load_balancing_type or ("aux_loss",)

    @property
    def load_balancing_losses(self) -> dict[str, float]:
        """The load-balancing losses, each with its weight; empty without one."""
        weights = zip(self.load_balancing, self.moe_aux_loss_coeff or (), strict=False)
        return {kind: weight for kind, weight in weights if kind.endswith("aux_loss") and weight}

    @property
    def is_sinkhorn(self) -> bool:
        """Whether experts are chosen by Sinkhorn's assignment."""
        return "sinkhorn" in self.load_balancing

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projection of queries, keys and values has a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def has_output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.add_output_bias or not self.disable_bias_linear

    @property
    def has_mlp_bias(self) -> bool:
        """Whether both matrices of the MLP have a bias."""
        return self.add_mlp_bias or not self.disable_bias_linear
