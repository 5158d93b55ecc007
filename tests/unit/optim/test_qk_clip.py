"""QK-clip in one process: a step of length 0 leaves the weights that its definition says."""

import shlex
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron_ext.parts.attention.compute import CausalSelfAttention
from megatron_ext.plugins.latent_attention.compute import LatentSelfAttention
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback

RUN = (
    "--seq-length 16 --mock-data --vocab-size 250 --eval-interval 100 --eval-iters 1 --lr 0 --lr-warmup-iters 0 "
    "--device cpu --num-workers 0 --exit-interval 1"
)
ALPHA, BOUND = 0.3, 2.53


class OneStep(Callback):
    """Keeps each attention with its weights before the step and the largest products of its heads, written out."""

    def on_start(self, trainer: Any) -> None:
        kinds = CausalSelfAttention, LatentSelfAttention
        self.attentions: list[Any] = [one for one in trainer.run.chunks[0].modules() if isinstance(one, kinds)]
        self.before = [
            {name: weight.detach().clone() for name, weight in one.named_parameters()} for one in self.attentions
        ]
        self.largest: dict[int, torch.Tensor] = {}
        for attention in self.attentions:
            attention.core_attention.register_forward_pre_hook(self._measure)

    def _measure(self, core: Any, heads: Any) -> None:
        query, key = heads[0].detach(), heads[1].detach()
        key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
        scale = core.softmax_scale or query.size(-1) ** -0.5
        length = query.size(2)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        products = (query @ key.mT * scale).masked_fill(~seen, -torch.inf).amax((0, 2, 3))
        self.largest[id(core)] = torch.maximum(self.largest.setdefault(id(core), products), products)

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.result = result


def stepped(model: str, threshold: float) -> OneStep:
    """Return what one step of length 0 was seen to do."""
    seen = OneStep()
    flags = f"{RECIPE} {RUN} {MODELS[model]} --qk-clip --qk-clip-alpha {ALPHA} --qk-clip-threshold {threshold}"
    pretrain(shlex.split(flags), callbacks=[seen])
    return seen


def close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=2e-6, atol=0.0, msg=name)


@pytest.mark.parametrize("model", ["untied, Muon", "untied", "sinks and gates"])
def test_heads_that_share_keys_are_rescaled_together(model: str) -> None:
    """Channels: 4 heads of 16 in 2 groups; queries, with gates their gates, keys and values of each group."""
    seen, clipped = stepped(model, BOUND), 0
    for attention, before in zip(seen.attentions, seen.before, strict=True):
        largest = seen.largest[id(attention.core_attention)].view(2, 2).amax(1)
        factor = (BOUND / largest).clamp(max=1.0).view(2, 1, 1)
        clipped += int((factor < 1.0).sum())
        parts = before["linear_qkv.weight"].view(2, -1, 64)
        gates = parts.size(1) - 32 - 16 - 16
        query, gate, key, value = parts.split((32, gates, 16, 16), dim=1)
        changed = torch.cat((query * factor**ALPHA, gate, key * factor ** (1 - ALPHA), value), dim=1)
        close(dict(attention.named_parameters()), {**before, "linear_qkv.weight": changed.view(-1, 64)})
    assert 0 < clipped < 2 * len(seen.attentions)
    largest = max(one.max().item() for one in seen.largest.values())
    assert seen.result.numbers == {"max_attention_logit": pytest.approx(largest)}


def test_megatron_core_rescales_the_same() -> None:
    seen = stepped("untied, Muon", BOUND)
    for attention, before in zip(seen.attentions, seen.before, strict=True):
        ours = {name: weight.detach().clone() for name, weight in attention.named_parameters()}
        with torch.no_grad():
            attention.linear_qkv.weight.copy_(before["linear_qkv.weight"])
            attention.core_attention.current_max_attn_logits = seen.largest[id(attention.core_attention)]
            attention.clip_qk()
        close(ours, dict(attention.named_parameters()))


@pytest.mark.parametrize(("model", "bound"), [("latents, Muon", 1.1), ("latents of keys alone", 1.8)])
def test_latent_heads_leave_the_key_that_they_share(model: str, bound: float) -> None:
    """4 heads: 12 channels of a query or key and 8 that are rotated, 16 of a value."""
    seen, clipped = stepped(model, bound), 0
    for attention, before in zip(seen.attentions, seen.before, strict=True):
        factor = (bound / seen.largest[id(attention.core_attention)]).clamp(max=1.0).view(4, 1, 1)
        clipped += int((factor < 1.0).sum())
        name = "linear_q_up_proj.weight" if "linear_q_up_proj.weight" in before else "linear_q_proj.weight"
        query, turned = before[name].unflatten(0, (4, 20)).split((12, 8), dim=1)
        key, value = before["linear_kv_up_proj.weight"].unflatten(0, (4, 28)).split((12, 16), dim=1)
        changed = {
            name: torch.cat((query * factor**ALPHA, turned * factor), dim=1).flatten(0, 1),
            "linear_kv_up_proj.weight": torch.cat((key * factor ** (1 - ALPHA), value), dim=1).flatten(0, 1),
        }
        close(dict(attention.named_parameters()), {**before, **changed})
    assert 0 < clipped < 4 * len(seen.attentions)
