"""AFM-4.5B: squared ReLU without a gate, biases in all matrices or none."""

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.shared import DECODER_FLAGS, DECODER_NAMES, biases_of_attention, decoder

ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    {**DECODER_NAMES, "mlp.linear_fc1": ("mlp.up_proj",)},
    {**DECODER_FLAGS, "swiglu": False, "squared_relu": True},
    *decoder(activation="relu2", biases="all"),
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    dependent_flags=biases_of_attention,
)
