"""StarCoder2: LayerNorm, GELU, rotary positions, a window in all layers or none."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

_NAMES = {**shared.DECODER_NAMES, "mlp.linear_fc1": ("mlp.c_fc",), "mlp.linear_fc2": ("mlp.c_proj",)}


STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    _NAMES,
    {**shared.DECODER_FLAGS, "swiglu": False, "normalization": "LayerNorm"},
    *shared.keys(
        shared.in_one_form({"mlp_type": "default"}),
        shared.decoder(epsilon="norm_epsilon", activation="gelu_pytorch_tanh"),
        shared.WINDOWS,
        shared.switch("use_bias", "disable_bias_linear", True, negated=True),
    ),
    {
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    dropouts=("attention_dropout", "residual_dropout", "embedding_dropout"),
)
