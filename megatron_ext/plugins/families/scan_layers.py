"""Holds what families with Mamba-1 layers have in common."""

from collections.abc import Sequence
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.plugins.families.family import Sections
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import layer_numbers
from megatron_ext.plugins.selective_scan.flags import SelectiveScanFlags

SCAN_SECTIONS = {"self_attention.in_proj": Sections((2,), by_groups=False)}
"""Order of the rows in the Hugging Face tensor: all channels, then all gates."""


def scan_names(module: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a layer's Mamba-1 mixer, which is the Hugging Face module `module`."""
    names = {one: one for one in ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj")}
    names |= {f"{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}
    return {f"self_attention.{ours}": (f"{module}.{theirs}",) for ours, theirs in names.items()}


def scan_values(reading: Reading, *keys: str) -> dict[str, Any]:
    """Return the flags of a Mamba-1 mixer but its channels and norms, from the keys of the numbers of a state, of the
    kernel, of the rank of time steps, and of the biases of projections and convolution."""
    state, kernel, rank, bias, conv_bias = keys
    automatic = -(-reading.integer("hidden_size") // 16)
    reading.understand("use_mambapy", "use_associative_scan", "use_falcon_mambapy")
    return {
        **{"scan_state_dim": reading.integer(state, 16), "scan_conv_kernel_dim": reading.integer(kernel, 4)},
        "scan_time_step_rank": automatic if reading.get(rank, "auto") == "auto" else reading.integer(rank),
        **{"scan_bias": reading.boolean(bias, False), "no_scan_conv_bias": not reading.boolean(conv_bias, True)},
    }


def scan_json(config: Config, *keys: str) -> dict[str, Any]:
    """Return the keys that `scan_values` reads."""
    scan = flags_of(config.model, SelectiveScanFlags)
    sizes = scan.scan_state_dim, scan.scan_conv_kernel_dim, scan.scan_time_step_rank
    return dict(zip(keys, (*sizes, scan.scan_bias, not scan.no_scan_conv_bias), strict=True))


WITHOUT_POSITIONS: dict[str, Any] = {"position_embedding_type": "none", "disable_bias_linear": True}
OF_JAMBA: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "vocab_size": 65536, "max_position_embeddings": 262144},
    **{"num_experts": 16, "num_experts_per_tok": 2},
}
"""Values that transformers takes for keys that are not in a file of Jamba."""

_PERIODS = (("attn", 8, 4), ("expert", 2, 1))
"""Kinds of layers with the usual period and offset of each."""


def read_pairs(reading: Reading, *, has_experts: bool) -> str:
    """Return the letters of layers of a mixer and an MLP or experts each, from the periods and offsets of those with
    attention and with experts."""
    found, numbers = [], layer_numbers(reading)
    for kind, usual, first in _PERIODS:
        period = reading.integer(f"{kind}_layer_period", usual)
        offset = reading.integer(f"{kind}_layer_offset", first, least=0)
        if offset >= period and reading.is_readable:
            reading.problems.append(f"{kind}_layer_offset {offset} is not below {kind}_layer_period {period}")
        found.append([number % period == offset for number in numbers])
    return "".join("S*"[one] + "-E"[other and has_experts] for one, other in zip(*found, strict=True))


def write_pairs(model: ModelConfig) -> dict[str, int]:
    """Return the keys that `read_pairs` reads."""
    found: dict[str, int] = {}
    for (kind, *_), (period, offset) in zip(_PERIODS, _cycles(model), strict=True):
        found |= {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}
    return found


def pairs_in_turn(model: ModelConfig) -> str:
    """Return the letters that `read_pairs` reads from what `write_pairs` writes: the model's, where its layers with
    attention, and with experts, have one period each."""
    (attends, first), (mixes, second) = _cycles(model)
    return "".join("S*"[one % attends == first] + "-E"[one % mixes == second] for one in range(model.num_layers // 2))


def _cycles(model: ModelConfig) -> list[tuple[int, int]]:
    letters = model.hybrid_layer_pattern or "S-" * (model.num_layers // 2)
    return [_cycle([one == letter for one in letters[start::2]]) for start, letter in ((0, "*"), (1, "E"))]


def _cycle(has: Sequence[bool]) -> tuple[int, int]:
    """Return the distance of the first two layers that have something, above their offset, and the offset."""
    places = [number for number, one in enumerate(has) if one] or [len(has)]
    first, second = (*places, max(2 * places[0] + 1, len(has)))[:2]
    return max(second - first, first + 1), first
