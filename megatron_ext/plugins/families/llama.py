"""Llama 2, 3, 3.1, 3.2: rope scaling (`llama3`), tied or not, biases of attention, of the MLP, of both or neither
(`--add-qkv-bias --add-output-bias`, `--add-mlp-bias`)."""

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
    other_names={
        "emu3_text_model": {
            **{"num_key_value_heads": 8, "max_position_embeddings": 9216, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
            "attention_dropout": 0.1,
        },
    },
)
