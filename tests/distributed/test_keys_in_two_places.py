"""A config.json that says something in two places: our logits are those of transformers with the same file."""

import json
from typing import Any

import pytest
import torch

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.hf_models import (
    flags,
    logits_of_folder,
    our_logits,
    quiet_transformers,
    reference_logits,
    whole_vocabulary,
    write_model,
)
from tests.support.hf_shapes import MODELS
from tests.support.plain_process import in_plain_process
from tests.support.several_models import in_turn

quiet_transformers()

_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "a scaling, which has the base": ("Llama 2", {"rope_scaling": {**_SCALING, "rope_theta": 10000.0}}),
    "a scaling, by its old name": ("Qwen2", {"rope_scaling": {"type": "llama3", **_SCALING}}),
    "a scaling, and the base next to it": ("Llama 3.1", {"rope_scaling": _SCALING, "rope_theta": 500000.0}),
    "a scaling with the base of the family": ("Mixtral", {"rope_scaling": _SCALING}),
    "a scaling without effect": ("OLMo-2", {"rope_scaling": {"type": "default", "rope_theta": 500000.0}}),
    "both names of the experts": ("Qwen3-MoE", {"num_experts": 6, "num_local_experts": 6}),
}
"""What is added to the file that transformers 5 wrote with a model, which has `rope_parameters`."""


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """By case: transformers' logits before the addition and after it, and ours after it."""
    before, after, folders = [], [], []
    for name, added in ADDED.values():
        folder = tmp_path_factory.mktemp("hf")
        before.append(reference_logits(write_model(folder, name)))
        config = folder / "config.json"
        content = json.loads(config.read_text())
        assert "rope_parameters" in content
        config.write_text(json.dumps({**content, **added}))
        after.append(in_plain_process(logits_of_folder, str(folder)))
        folders.append(folder)
    [ours] = run_ranks(1, in_turn, our_logits, [flags(["--load-hf", str(folder)]) for folder in folders], timeout=550)
    return dict(zip(ADDED, zip(before, after, map(_whole, ours), strict=True), strict=True))


def _whole(part: torch.Tensor) -> torch.Tensor:
    return whole_vocabulary([part])


@pytest.mark.parametrize("case", ADDED)
def test_logits_are_those_of_transformers_with_the_same_file(case: str, logits: dict[str, Any]) -> None:
    before, after, ours = logits[case]
    name, added = ADDED[case]
    if added.get("rope_scaling", {}).get("rope_type") == "llama3" and "rope_scaling" not in MODELS[name]:
        assert (after - before).abs().max() > 0.01, "a file that was read without the addition would pass too"
    assert (ours - after).abs().max() < 1e-5
