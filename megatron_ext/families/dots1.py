"""dots.llm1: Qwen3 with DeepSeek-V3's experts."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import BIASED_SIGMOID, MIXTURE_NAMES, Mixture
from megatron_ext.families.reading import Reading

_MIXTURE = Mixture(BIASED_SIGMOID, group_scores=2, normalized=True)


def _read(reading: Reading) -> dict[str, Any]:
    first = reading.integer("max_window_layers", least=0)
    usual = [number >= first for number in shared.layer_numbers(reading)]
    return {
        **shared.decoder_values(reading, biases="attention"),
        **_MIXTURE.values(reading),
        **shared.layer_window_values(reading, shared.typed_windows(reading, usual)),
    }


def _write(config: Config) -> dict[str, Any]:
    return {
        **shared.decoder_json(config, biases="attention"),
        **_MIXTURE.json(config),
        **shared.typed_window_json(config),
    }


DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    MIXTURE_NAMES,
    {**shared.DECODER_FLAGS, "qk_layernorm": True},
    _read,
    _write,
    {"norm_topk_prob": False, "sliding_window": 4096, "max_window_layers": 62, "max_position_embeddings": 2048},
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=lambda model: {**shared.biases_of_attention(model), **_MIXTURE.dependent_flags(model)},
)
