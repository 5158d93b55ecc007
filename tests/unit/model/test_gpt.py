"""What each rank's part of a model is: whose rows of a vocabulary and heads, and who adds."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from megatron_ext.model import linear_cross_entropy
from megatron_ext.model.config import transformer_config
from megatron_ext.model.gpt import GPT
from megatron_ext.model.linear_cross_entropy import Vocabulary
from megatron_ext.parallel.own_groups import rank_groups
from megatron_ext.parts import spec
from megatron_ext.parts.attention.cached import KeyValueCache, TextsInARow, WholeSequences
from megatron_ext.parts.catalogue import parameters
from megatron_ext.parts.experts.router import Router
from megatron_ext.parts.linear.compute import ColumnLinear
from megatron_ext.parts.stack import stack
from tests.support.small_models import LLAMA, OLMO2, build_small_model, small_config


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize("normed", [False, True])
def test_transformer_engine_has_norms_of_queries_and_keys_where_the_model_has(
    normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(spec, "get_gpt_layer_with_transformer_engine_spec", lambda **given: asked.append(given))
    [(kind, _)] = stack(small_config({**LLAMA, "qk_layernorm": normed})).kinds
    spec._transformer_engine_spec(kind)
    assert asked == [{"qk_layernorm": normed}]


def test_gradients_of_a_shared_vocabulary_are_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's label lies on one rank; on the other its row of the gradient is a share of the softmax alone."""
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(7, 8, generator=generator)
    labels, counts = torch.tensor([0, 3, 4, 7, 5, 1, 3]), torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0, 1.0, 1.0])
    whole = logits.clone().requires_grad_()
    losses = F.cross_entropy(whole, labels, reduction="none")
    (losses * counts).sum().backward()
    assert whole.grad is not None

    def over_ranks(normalizer: torch.Tensor, of_label: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        part = logits.chunk(2, dim=1)[group.rank()]
        torch.testing.assert_close(normalizer, part.logsumexp(1, keepdim=True))
        here = labels // 4 == group.rank()
        assert torch.equal(of_label[:, 0], torch.where(here, logits[torch.arange(7), labels], 0.0))
        return logits.logsumexp(1, keepdim=True), logits.gather(1, labels[:, None])

    monkeypatch.setattr(linear_cross_entropy, "_over_ranks", over_ranks)
    for rank in range(2):
        own = logits.chunk(2, dim=1)[rank].clone()
        found, gradient = linear_cross_entropy._losses(own, labels, counts, Vocabulary(4, _group(rank, 2)), graded=True)
        torch.testing.assert_close(found, losses.detach())
        torch.testing.assert_close(gradient, whole.grad.chunk(2, dim=1)[rank], rtol=1e-5, atol=1e-6)


def test_a_bias_of_columns_is_added_where_they_are() -> None:
    """Whatever the engine asks for; nothing is left to be added later, which nobody would do."""
    config = transformer_config(small_config(), "cpu")
    made = ColumnLinear(
        3, 2, config=config, init_method=torch.nn.init.zeros_, bias=True, skip_bias_add=True, tp_group=_group(0, 1)
    )
    assert made.skip_bias_add is False


def test_a_run_and_every_global_batch_begin_with_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bias(router: Any, *_: Any) -> None:
        torch.nn.Module.__init__(router)
        router.local_tokens_per_expert, router.enable_expert_bias = None, False

    monkeypatch.setattr(TopKRouter, "__init__", without_bias)
    groups: Any = SimpleNamespace(dp="dp")
    described: Any = SimpleNamespace(
        **{
            "capacity": None,
            "sparse_mixer": None,
            "group_scores": None,
            "unnormalized": False,
            "bias_of_logits": False,
        },
        mlp=SimpleNamespace(bias=False),
    )
    router: Any = Router(Any, groups, described=described)  # pyright: ignore[reportArgumentType]
    assert (router._tokens_before_E, router._microbatches_before, router.dp_group) == (0, 0, "dp")
    router._tokens_before_E, router._microbatches_before = torch.ones(4), 7
    router.reset_global_aux_loss_tracker()
    assert (router._tokens_before_E, router._microbatches_before) == (0, 0)


def test_groups_of_ranks_come_in_the_engines_order() -> None:
    """Also where one dimension in the middle is masked, or all but it."""
    for sizes in ((2, 3, 4), (3, 1, 2, 2), (5,)):
        for mask in itertools.product((True, False), repeat=len(sizes)):
            if any(mask):
                world = torch.Size(sizes).numel()
                known = parallel_state.generate_masked_orthogonal_rank_groups(world, list(sizes), list(mask))
                assert rank_groups(world, sizes, mask) == known, (sizes, mask)


@pytest.mark.parametrize("sizes", [{}, {"num_experts": 2, "disable_bias_linear": True}])
def test_weights_whose_gradients_sequence_parallel_ranks_add(sizes: dict[str, Any]) -> None:
    """What each of them applies to its own part of a sequence, and holds whole."""
    found = {
        one.name.removeprefix("decoder.layers.0.")
        for one in parameters(small_config({"num_layers": 1, **sizes}))
        if one.sequence_parallel
    }
    norms = {
        f"{name}.{what}"
        for name in ("input_layernorm", "pre_mlp_layernorm", "decoder.final_layernorm")
        for what in ("weight", "bias")
    }
    others = {"mlp.router.weight"} if sizes else {"self_attention.linear_proj.bias", "mlp.linear_fc2.bias"}
    assert found == norms | others


MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "Llama": LLAMA,
    "OLMo 2": OLMO2,
    "pairs of neighbouring channels, half of them rotated": {
        **LLAMA,
        "rotary_interleaved": True,
        "rotary_percent": 0.5,
    },
    "pairs of neighbouring channels, all of them": {**LLAMA, "rotary_interleaved": True},
    "Mixtral": {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32},
}
ROWS, LENGTH = 3, 12
PROMPTS = [4, 9, 1]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> GPT:
    chunks, _ = build_small_model(small_config(MODELS[request.param]))
    return chunks[0].eval().requires_grad_(False)


def _tokens() -> torch.Tensor:
    return torch.randint(250, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


def _expected(model: GPT, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Return the logits of a training's pass, [B, S, V]."""
    with torch.no_grad():
        return model(tokens_BS, torch.arange(LENGTH)[None])[..., :250]


def test_whole_sequences(model: GPT) -> None:
    tokens = _tokens()
    expected = _expected(model, tokens)
    wanted = torch.tensor([11 * ROWS + 2, 0, 4 * ROWS + 1, 4 * ROWS + 1, 11 * ROWS])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = model(tokens, torch.arange(LENGTH)[None], inference=WholeSequences(wanted))[:, :250]
        torch.testing.assert_close(found, expected[wanted % ROWS, wanted // ROWS], rtol=1e-5, atol=1e-5)


def test_texts_one_after_another(model: GPT) -> None:
    tokens, filled = _tokens(), 2
    expected = _expected(model, tokens)[torch.arange(ROWS), torch.tensor(PROMPTS) - 1]
    texts = torch.cat([*(tokens[row, :length] for row, length in enumerate(PROMPTS)), tokens[0, :filled]])
    positions = torch.cat([torch.arange(length) for length in (*PROMPTS, filled)])
    for count in (0, filled):
        here = slice(len(texts) - filled + count)
        with torch.inference_mode():
            inference = TextsInARow(PROMPTS, count, torch.device("cpu"))
            found = model(texts[None, here], positions[None, here], inference=inference)[:, :250]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_keys_and_values_kept_of_unequal_prompts(model: GPT) -> None:
    """The longest prompt of all replicas, whose width the rows have, may be another's; here all may be of one
    length."""
    tokens = _tokens()
    expected, rows = _expected(model, tokens), torch.arange(ROWS)
    steps = LENGTH - max(PROMPTS)
    for lengths, width in ((PROMPTS, 9), (PROMPTS, 11), ([9] * ROWS, 9), ([9] * ROWS, 10)):
        prompts = torch.zeros(ROWS, width, dtype=torch.int64)
        for row, length in enumerate(lengths):
            prompts[row, :length] = tokens[row, :length]
        with torch.inference_mode():
            cache = KeyValueCache(width + steps, lengths, width, torch.device("cpu"))
            found = [model(prompts, torch.arange(width)[None], inference=cache)]
            for _ in range(steps):
                places = cache.advance()
                found.append(model(tokens.gather(1, places), places, inference=cache))
        for step, logits in enumerate(found):
            last = torch.tensor(lengths) + step - 1
            torch.testing.assert_close(logits[:, :250], expected[rows, last], rtol=1e-5, atol=1e-5)


def test_memory_is_bounded(model: GPT) -> None:
    with torch.inference_mode():
        cache = KeyValueCache(LENGTH, [LENGTH] * ROWS, LENGTH, torch.device("cpu"))
        model(_tokens(), torch.arange(LENGTH)[None], inference=cache)
        with pytest.raises(AssertionError, match="fewer positions"):
            cache.advance()


def test_the_prompts_pass_scales_scores_as_it_is_told() -> None:
    """With half of the usual scale the scores are those of half of the query."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 2, 3, 4, generator=generator) for _ in range(3))
    cache = KeyValueCache(3, [3, 3], 3, torch.device("cpu"))
    usual = WholeSequences(torch.tensor([0])).attend(1, query / 2, key, value, scale=0.5)
    assert torch.equal(cache.attend(1, query, key, value, scale=0.25), usual)
