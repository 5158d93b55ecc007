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
        "Number of key/value heads in sliding-window layers; default: as many as in the other layers.",
        resume="shape",
        at_least=1,
    )
    value_channels: int | None = option(
        None, "Channels of one value head; default: --kv-channels.", resume="shape", at_least=1
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
        "RoPE base of sliding-window layers, unscaled; default: --rotary-base, scaled as in the other layers.",
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
        "Divide positions by this factor before RoPE (linear scaling): how far the context is stretched.",
        resume="function",
        positive=True,
        read_with=_ROTARY,
    )
    window_size: str | None = option(
        None,
        "Sliding window LEFT,RIGHT of windowed layers: a query sees LEFT positions before its own and RIGHT after; "
        "RIGHT is 0, LEFT -1 is no limit. 4095,0 is a window of 4096 positions.",
        resume="function",
        metavar="LEFT,RIGHT",
    )
    window_attn_skip_freq: str | None = option(
        None,
        "Layers with the window of --window-size; default all. N: in every N layers the last has none; a list such "
        "as [1,1,1,0]*6: layers marked 1 have it.",
        resume="function",
        metavar="N|LIST",
    )
    no_rope_freq: str | None = option(
        None,
        "Layers without rotary positions, with --position-embedding-type rope; default none. N: every N-th layer; a "
        "list such as [0,0,0,1]*6: layers marked 1.",
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
        "With --use-rope-scaling, wavelengths above the original context length divided by this are stretched in full.",
        resume="function",
        positive=True,
        read_with=_SCALED,
    )
    rope_scaling_high_freq_factor: float = option(
        4.0,
        "With --use-rope-scaling, wavelengths below the original context length divided by this are not stretched.",
        resume="function",
        read_with=_SCALED,
    )
    rope_scaling_original_max_position_embeddings: int = option(
        8192,
        "With --use-rope-scaling, context length that the model had before the stretch.",
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
        "One letter for each layer: * attention, - MLP, E experts, {choices}. | ends a pipeline chunk. Each layer "
        "has one norm and one residual addition; --num-layers is the number of letters. /*E/*E at the end adds two "
        "depths of --mtp-num-layers with these letters.",
        resume="shape",
        metavar="LETTERS",
        aliases=("--hybrid-override-pattern",),
        computed_by_ours=True,
    )
    rope_type: str | None = option(
        None,
        "Scaling of rotary frequencies: none (rope), YaRN, factors for each pair of channels (longrope), or a "
        "larger base (dynamic); the last two by --seq-length. Default yarn with --multi-latent-attention, else "
        "rope.",
        resume="function",
        choices=("rope", "yarn", "longrope", "dynamic"),
        needs=dict.fromkeys(("yarn", "longrope", "dynamic"), _STRETCHED),
    )
    rotary_scaling_factor: float = option(
        1.0,
        "With --rope-type yarn, longrope or dynamic, how far the context is stretched.",
        resume="function",
        at_least=1,
        read_with=_YARN,
        dropped_unread=True,
    )
    original_max_position_embeddings: int = option(
        4096,
        "With --rope-type yarn, longrope or dynamic, context length that the model had before the stretch.",
        resume="function",
        at_least=1,
        read_with=_YARN,
        dropped_unread=True,
    )
    rotary_attention_factor: float | None = option(
        None,
        "With --rope-type yarn or longrope, factor of rotated queries and keys; default as published: from --mscale "
        "(yarn) or the logarithm of the stretch (longrope).",
        resume="function",
        positive=True,
        read_with=_YARN,
        dropped_unread=True,
    )
    longrope_short_factor: tuple[float, ...] | None = option(
        None,
        "With --rope-type longrope, stretch of each pair of channels where --seq-length is at most "
        "--original-max-position-embeddings.",
        resume="function",
        read_with=_YARN,
        dropped_unread=True,
    )
    longrope_long_factor: tuple[float, ...] | None = option(
        None,
        "With --rope-type longrope, stretch of each pair of channels where --seq-length is above "
        "--original-max-position-embeddings.",
        resume="function",
        read_with=_YARN,
        dropped_unread=True,
    )
    beta_fast: float = option(
        32.0,
        "YaRN: channels with more rotations than this over the original context are not stretched.",
        resume="function",
        positive=True,
        read_with=_YARN,
        dropped_unread=True,
    )
    beta_slow: float = option(
        1.0,
        "YaRN: channels with fewer rotations than this over the original context are stretched in full.",
        resume="function",
        positive=True,
        read_with=_YARN,
        dropped_unread=True,
    )
    no_yarn_correction_range_round_to_int: bool = option(
        False,
        "YaRN: do not round the channel indices between which stretched channels pass into unstretched ones.",
        resume="function",
        read_with=_YARN,
        dropped_unread=True,
    )
    mscale: float = option(
        1.0,
        "YaRN: rotated queries and keys are multiplied by 0.1 x mscale x ln(stretch) + 1.",
        resume="function",
        at_least=0,
        read_with=_YARN,
        dropped_unread=True,
    )
    mscale_all_dim: float = option(
        0.0,
        "YaRN: with m = 0.1 x mscale_all_dim x ln(stretch) + 1, all attention scores are multiplied by m squared, "
        "and rotated queries and keys divided by m.",
        resume="function",
        at_least=0,
        read_with=_YARN,
        dropped_unread=True,
    )
    swiglu: bool = option(False, "SwiGLU activation in the MLP (gate x SiLU).", resume="shape")
    geglu: bool = option(
        False, "GeGLU activation in the MLP (gate x GELU); with --openai-gelu the tanh form of GELU.", resume="shape"
    )
    quick_geglu: bool = option(
        False,
        "GeGLU activation in the MLP with GELU approximated by x sigmoid(1.702 x), as in GPT-OSS.",
        resume="shape",
    )
    activation_func_clamp_value: float | None = option(
        None,
        "Gated MLP: upper bound of the gate before its activation, and bound of the absolute value of the linear "
        "half; default none.",
        resume="function",
        positive=True,
    )
    glu_linear_offset: float = option(
        0.0, "Gated MLP: added to the linear half before the product with the gate; 1 in GPT-OSS.", resume="function"
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
        "Parameters of each norm: a weight and, for LayerNorm, a bias (all); only a weight; or none.",
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
        "Norms before attention and MLP, after them (on their outputs), or both; after-attention: after attention "
        "and MLP in attention layers, before them in all other layers; after-experts: before attention and MLP, and "
        "after experts.",
        resume="shape",
        choices=("before", "after", "both", "after-attention", "after-experts"),
    )
    parallel_residual: str = option(
        "none",
        "Attention and MLP read the same residual stream, through one norm (GPT-J, Falcon 7B, Command R) or two "
        "(GPT-NeoX, Falcon 40B); none: the MLP reads the stream after attention.",
        resume="shape",
        choices=("none", "one-norm", "two-norms"),
        needs={
            norms: [
                Need("norm_position", "before", "norms before attention and MLP"),
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
        "SwiGLU: factors of the gate before its activation, and of the MLP's output; default 1.",
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
        "--softmax-type of sliding-window layers; default: --softmax-type.",
        resume="shape",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    attention_logit_softcapping: float | None = option(
        None,
        "Softcap c of attention scores: c tanh(scores / c), as in Gemma 2; default none.",
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
        "What one gate of --attention-output-gate multiplies: a channel, or a whole head, as in Step-3.5.",
        resume="shape",
        choices=("channel", "head"),
        needs={"head": [Need("attention_output_gate", True, "gates of what attention gives")]},
    )
    qkv_clip: float | None = option(
        None,
        "Clamp queries, keys and values to [-c, c], as OLMo and DBRX; default no limit.",
        resume="function",
        positive=True,
    )
    attention_temperature_scale: float | None = option(
        None,
        "Multiply queries by 1 + scale x ln(1 + floor(position / --attention-temperature-step)); default no factor.",
        resume="function",
        positive=True,
    )
    attention_temperature_step: float = option(
        8192.0,
        "Number of positions over which the factor of --attention-temperature-scale stays constant.",
        resume="function",
        positive=True,
        read_with=ReadWith(
            "attention_temperature_scale", "without --attention-temperature-scale queries stay as they are"
        ),
        dropped_unread=True,
    )
    attention_temperature_of: str = option(
        "fixed",
        "Layers with --attention-temperature-scale: without rotary positions (--no-rope-freq; positions counted "
        "from 1, as in Llama 4), or with them (counted from 0, as in Ministral 3).",
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
        "Chunk length of chunked attention in rotary layers, as in Llama 4; sequences longer than one chunk are "
        "refused. Default none.",
        resume="function",
        at_least=1,
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "Give the output layer a matrix of its own instead of the word embedding table.", resume="shape"
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
        "Add a bias to the logits, as Phi does.",
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
        "Divide rotated queries and keys by their root mean square, as Llama 4 does: --qk-layernorm without weights.",
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
        "What --qk-layernorm normalizes over: one head, with weights shared by all heads or of each head "
        "(each-head, Command R+), or all heads of a token (projection, OLMo-2).",
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
        "Whether --qk-layernorm comes before the rotation of queries and keys or after it, as in Hunyuan.",
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
    mtp_hybrid_override_pattern: str | None = option(
        None,
        "One letter of --hybrid-layer-pattern for each layer of a depth of --mtp-num-layers; the same in all depths.",
        resume="shape",
        metavar="LETTERS",
        read_with=ReadWith("mtp_num_layers", "without --mtp-num-layers one token is predicted"),
        computed_by_ours=True,
    )
    mtp_use_repeated_layer: bool = option(
        False,
        "Give all depths of --mtp-num-layers the weights of one, which is applied once for each further token.",
        resume="shape",
        read_with=ReadWith("mtp_num_layers", "without --mtp-num-layers one token is predicted"),
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
        "Number of experts of each mixture-of-experts layer, in place of the layer's MLP.",
        resume="shape",
        at_least=1,
        at_most=65_536,
        computed_by_ours=True,
    )
    moe_layer_freq: str | None = option(
        None,
        "Layers with experts instead of an MLP; default all. N: the first of every N layers; a list such as "
        "[0]*3+[1]*58: layers marked 1.",
        resume="shape",
        metavar="N|LIST",
    )
    moe_ffn_hidden_size: int | None = option(
        None, "Width inside each expert; default: --ffn-hidden-size.", resume="shape", at_least=1
    )
    moe_latent_size: int | None = option(
        None,
        "Width of the inputs and outputs of routed experts, behind one projection down and one up that all experts "
        "share; default --hidden-size.",
        resume="shape",
        at_least=1,
    )
    moe_router_topk: int = option(
        2, "Experts that compute each token.", resume="function", at_least=1, read_with=_EXPERTS
    )
    moe_router_score_function: str = option(
        "softmax",
        "Function from router logits to scores; with any but softmax the scores of a token's experts are divided by "
        "their sum.",
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
        "Multiply the input of a token's one expert by its weight, instead of its inner activations.",
        resume="function",
        needs={True: [Need("moe_router_topk", 1, "one expert for each token")]},
        read_with=_EXPERTS,
    )
    moe_router_sparsemixer_eps: float | None = option(
        None,
        "Choose two experts of a token one after the other by SparseMixer-v2, as Phi-3.5-MoE does: in training at "
        "random among experts whose logits are within 2 eps of the largest, relative to the largest; default top k.",
        resume="function",
        positive=True,
    )
    moe_router_dtype: str | None = option(
        None,
        "Precision of the router's logits; default: the precision of the weights.",
        resume="function",
        choices=("fp32", "fp64"),
        read_with=_EXPERTS,
    )
    moe_router_load_balancing_type: tuple[str, ...] | None = option(
        None,
        "Load balancing of experts: an auxiliary loss over each microbatch (the default), each sample or the global "
        "batch so far; Sinkhorn's assignment of each microbatch; or none.",
        resume="free",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        read_with=_EXPERTS,
    )
    moe_aux_loss_coeff: tuple[float, ...] | None = option(
        None, "Weight of the load-balancing loss, or of each of several, in the total loss; default 0.", resume="free"
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "Capacity of an expert in training: factor of the even share of a microbatch's tokens; tokens above it skip "
        "the expert. Default no limit.",
        resume="free",
        positive=True,
    )
    moe_token_drop_policy: str = option(
        "probs",
        "Tokens that an expert keeps under --moe-expert-capacity-factor: the ones of greatest router weight "
        "(probs), or the first (position).",
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
        False, "For benchmarks: choose experts at random, so that all have the same load.", resume="free"
    )
    moe_z_loss_coeff: float | None = option(
        None, "Coefficient of the router's z-loss, which keeps router logits small, in the total loss.", resume="free"
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "Width of the shared experts together, which compute every token beside the routed ones; default none.",
        resume="shape",
        at_least=1,
    )
    moe_shared_expert_average: bool = option(
        False,
        "Average the output of the shared experts with the output of the routed ones, instead of adding both.",
        resume="function",
        read_with=ReadWith(
            "moe_shared_expert_intermediate_size", "without --moe-shared-expert-intermediate-size nothing is averaged"
        ),
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
        "muP: head size at which attention's scale is 1 / its square root; default 1.",
        resume="function",
        positive=True,
        read_with=_MUP,
    )
    mup_attn_scale_power: float = option(
        1.0,
        "muP: power of the head size by which attention's scale falls.",
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
        128,
        "Pad the vocabulary to a multiple of this number times the tensor-parallel size.",
        resume="free",
        at_least=1,
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
    def layers_ahead(self) -> int:
        """Number of layers in all depths of multi-token prediction: one in each, or one for each letter."""
        of_depth = self.mtp_hybrid_override_pattern
        return (self.mtp_num_layers or 0) * (1 if of_depth is None else len(of_depth))

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
