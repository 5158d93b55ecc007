"""Says whether a layout fits in a device's memory: what `--dry-run` prints last.

    lines, fits = verdict(config, device_memory_gb=80)

The bytes are those of plan/memory.py: formulas, which leave out the CUDA context, NCCL's buffers and what the allocator
loses between blocks; 8% of the memory are left for these.
"""

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.plan.hardware import TABLE
from megatron_ext.plan.memory import worst_stage
from megatron_ext.plan.shapes import Shapes

USABLE = 0.92
"""Share of a device's memory that a layout may fill, as by default in tools/plan.py."""


def verdict(
    config: Config, *, device_memory_gb: float | None = None, device_name: str | None = None
) -> tuple[list[str], bool]:
    """Return lines about the memory of the rank that needs most, and whether it fits; True where no memory is given.

    Args:
        config: a resolved and validated configuration.
        device_memory_gb: memory of one device in GB (1e9 bytes); wins over that of the name.
        device_name: a row of `plan.hardware.TABLE`.
    Raises:
        ConfigurationError: there is no device of that name.
    """
    if device_name is not None and device_name not in TABLE:
        raise ConfigurationError(
            f"--device-name {device_name} is not one of {', '.join(TABLE)}; use --device-memory-gb for another device"
        )
    stage, needed = worst_stage(config, Shapes(config), fused=config.layout.device != "cpu")
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in needed.parts.items())
    lines = [f"memory of a rank     {needed.total / 1e9:.2f} GB on stage {stage}, estimated: {parts}"]
    memory = device_memory_gb or (TABLE[device_name].memory_gb if device_name is not None else None)
    if memory is None:
        lines.append("                     (--device-memory-gb 80 or --device-name h100 says whether it fits)")
        return lines, True
    usable = memory * USABLE
    fits = needed.total / 1e9 <= usable
    what = device_name if device_name is not None and device_memory_gb is None else f"{memory:g} GB"
    answer = "fits" if fits else f"does not fit, {needed.largest} being the largest part"
    lines.append(f"on {what:<18}{answer}: {needed.total / 1e9:.2f} of {usable:.1f} GB ({USABLE:.0%} of {memory:g})")
    if not fits:
        lines.append("                     tools/plan.py searches for a layout that fits")
    return lines, fits
