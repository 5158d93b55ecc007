"""Makes the question that the search answers from what the user typed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_ext.config.parse.blend import DATA_PATH_NAMES
from megatron_ext.config.resolve import Facts
from megatron_ext.cost.hardware import Machine
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner.layout_choices import Choice
from megatron_ext.plugins.planner.search import Question


def question(
    values: Mapping[str, Any], facts: Facts, world_size: int, machine: Machine, memory_share: float
) -> Question:
    """Return the question for a search.

    Args:
        values: what the user typed, by field name.
        facts: what was found outside of the flags on this machine, which need not be the one that is planned for.
        memory_share: share of a device's memory that a layout may fill.
    Raises:
        ConfigurationError: no global batch size was given: it decides how many microbatches there are.
    """
    known = {**facts.huggingface, **values}
    if known.get("global_batch_size") is None:
        raise ConfigurationError("a plan needs the samples of a step; add for example --global-batch-size 512")
    of_devices = replace(facts, world_size=None, cuda_available=machine.devices.is_gpu)
    usable = machine.devices.memory_gb * 1e9 * memory_share
    return Question({**known, **placeholders(known)}, of_devices, world_size, machine, usable)


def placeholders(values: Mapping[str, Any]) -> Choice:
    """Return placeholders for values that a run needs and a plan does not: the rules ask for them, and the user gave
    none."""
    added: Choice = {}
    if values.get("lr") is None:
        added["lr"] = 1e-4
    if values.get("train_iters") is None and values.get("train_samples") is None:
        added["train_iters"] = 1000
    if not values.get("mock_data") and not any(values.get(name) for name in DATA_PATH_NAMES):
        added["mock_data"] = True
    return added
