"""Llama: the decoder that others vary; with biases in all matrices or in none."""

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.shared import DECODER_FLAGS, DECODER_NAMES, biases_of_attention, decoder

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    DECODER_NAMES,
    DECODER_FLAGS,
    *decoder(biases="all"),
    dependent_flags=biases_of_attention,
    is_common=True,
)
