"""Drafts of multi-token prediction change no token, whatever attention keeps and however many of them are right."""

from typing import Any

import pytest

from megatron_ext.device.cpu import CpuDevice
from megatron_ext.plugins.tasks.generation import generate
from megatron_ext.plugins.tasks.inference_model import Model
from megatron_ext.plugins.tasks.sampling import Sampling
from tests.support.small_models import INDEXED, LATENTS, LLAMA, MIXTURE, build_small_model, small_config

# Of the second tier: tests/plugins/tasks evaluates without drafts.
pytestmark = pytest.mark.full

TIED = {**LLAMA, "untie_embeddings_and_output_weights": False}
MODELS: dict[str, dict[str, Any]] = {
    "Llama, tied": {**TIED, "mtp_num_layers": 1},
    "two depths": {**LLAMA, "mtp_num_layers": 2},
    "one key head, three depths": {**LLAMA, "num_query_groups": 1, "mtp_num_layers": 3},
    "windows in some layers": {**TIED, "window_size": "3,0", "window_attn_skip_freq": "2", "mtp_num_layers": 2},
    "windows with sinks": {**LLAMA, "window_size": "4,0", "softmax_type": "learnable", "mtp_num_layers": 2},
    "capped scores": {**LLAMA, "attention_logit_softcapping": 5.0, "mtp_num_layers": 2},
    "ALiBi": {**LLAMA, "position_embedding_type": "alibi", "mtp_num_layers": 2},
    "part of the channels rotated": {**LLAMA, "rotary_percent": 0.5, "mtp_num_layers": 2},
    "latents": {**LATENTS, "mtp_num_layers": 2},
    "chosen keys": {**INDEXED, "mtp_num_layers": 2},
    "experts": {**LLAMA, **MIXTURE, "mtp_num_layers": 2},
}
PROMPTS = [[1, 0, 2, 2, 1], [2], [0, 1, 1], [1, 2, 0, 0, 0, 1, 2, 1, 2]]
IDS = 3
"""So few that a random model's drafts are right now and then."""


def _model(flags: dict[str, Any]) -> Model:
    config = small_config({**flags, "padded_vocab_size": 8, "init_method_std": 0.4}, vocab_size=IDS)
    chunks, groups = build_small_model(config)
    device: Any = CpuDevice()
    p2p: Any = None
    return Model(config, device, groups, p2p, [chunk.eval() for chunk in chunks], None)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_without_drafts(name: str) -> None:
    model, sampling = _model(MODELS[name]), Sampling(max_new_tokens=20)
    plain = []
    for rows, prompts in ((1, PROMPTS[::2]), (4, PROMPTS)):
        plain = generate(model, prompts, sampling, rows=rows)
        found = generate(model, prompts, sampling, rows=rows, speculative=True)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        drafted, accepted = (sum(getattr(one, what) for one in found) for what in ("drafted", "accepted"))
        assert 0 < accepted < drafted
    assert len({tuple(one.tokens) for one in plain}) > 1
