"""nanochat: norms without weights (`--norm-parameters none`), also of the word embeddings and of rotated queries and
keys (`--qk-l2-norm`), squared ReLU without a gate, `--final-logit-softcapping`; its class rotates backwards, which
forwards is the halves of each head in the other order, as they are read and written."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

_NAMES = {name: theirs for name, theirs in shared.DECODER_NAMES.items() if "norm" not in name}
_CAP = "final_logit_softcapping"

NANOCHAT = Family(
    "nanochat",
    "NanoChatForCausalLM",
    {**_NAMES, "mlp.linear_fc1": ("mlp.fc1",), "mlp.linear_fc2": ("mlp.fc2",)},
    {
        **{"position_embedding_type": "rope", "normalization": "RMSNorm", "norm_parameters": "none"},
        **{"embed_layernorm": True, "qk_l2_norm": True, "squared_relu": True, "disable_bias_linear": True},
    },
    *shared.keys(
        shared.decoder(activation="relu2", biases="attention"),
        (
            lambda reading: {"final_logit_softcapping": reading.number_or_none(_CAP)},
            lambda config: {_CAP: config.model.final_logit_softcapping},
        ),
    ),
    {
        **{"vocab_size": 50304, "hidden_size": 768, "intermediate_size": 8192, "num_hidden_layers": 12},
        **{"num_attention_heads": 6, _CAP: 15.0},
    },
    dependent_flags=shared.biases_of_attention,
    rotates="backwards",
)
