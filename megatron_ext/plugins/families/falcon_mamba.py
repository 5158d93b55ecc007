"""Falcon-Mamba: mamba with norms of time steps, B and C that have no weights (`--scan-norm without-weights`,
`--scan-norm-epsilon`)."""

from typing import Any

from megatron_ext.config.schema import Config, flags_of
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mamba import MAMBA, read_mamba, write_mamba
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.selective_scan.flags import SelectiveScanFlags

_EPSILON = "mixer_rms_eps"


def _read(reading: Reading) -> dict[str, Any]:
    return {**read_mamba(reading), "scan_norm_epsilon": reading.number(_EPSILON, 1e-6)}


def _write(config: Config) -> dict[str, Any]:
    scan = flags_of(config.model, SelectiveScanFlags)
    return {**write_mamba(config), _EPSILON: scan.scan_norm_epsilon or config.model.norm_epsilon}


FALCON_MAMBA = Family(
    "falcon_mamba",
    "FalconMambaForCausalLM",
    MAMBA.names,
    {**MAMBA.flags, "scan_norm": "without-weights"},
    _read,
    _write,
    MAMBA.defaults,
    dependent_flags=MAMBA.dependent_flags,
    layers=MAMBA.layers,
    sections=MAMBA.sections,
    dropouts=(),
    respelled=MAMBA.respelled,
)
