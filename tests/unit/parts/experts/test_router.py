"""Sinkhorn's assignment against megatron-core's own on one rank, and experts' weights in 16 bits."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, sinkhorn
from megatron.core.transformer.moe.router import TopKRouter

from megatron_ext.parts.experts import compute
from megatron_ext.parts.experts.compute import GroupedExperts, rows_of_biases
from megatron_ext.parts.experts.describe import Capacity
from megatron_ext.parts.experts.router import Router, preferred, sparsely_mixed
from tests.support.small_models import LLAMA, build_small_model, small_config


def _router(topk: int, training: bool) -> Any:
    router: Any = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.config, router.topk, router.sparse_mixer = SimpleNamespace(moe_aux_loss_coeff=0), topk, None
    router.tp_cp_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return router.train(training)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("topk", [1, 2])
def test_on_one_rank_it_is_the_engines(topk: int, training: bool, dtype: torch.dtype) -> None:
    """In training balanced, else by the weights alone: a sigmoid for one expert, a softmax for several."""
    logits = (2.0 * torch.randn(64, 8, generator=torch.Generator().manual_seed(topk)) + torch.arange(8)).to(dtype)
    router = _router(topk, training)
    (weights, chosen), (known, of_engine) = (
        sort.sinkhorn_load_balancing(router, logits) for sort in (Router, TopKRouter)
    )
    assert torch.equal(chosen, of_engine)
    assert torch.equal(weights, known)
    assert weights.dtype == dtype
    assert chosen.sum(1).tolist() == [topk] * 64
    load = chosen.sum(0)
    assert (load.max() < 4 * load.min()) == training, "the last experts are the favourites of most"


def test_the_assignment_is_balanced_in_fp32() -> None:
    logits = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(_router(1, True)._own_rows(sinkhorn, logits), sinkhorn(logits.float()))


@pytest.mark.parametrize("draws", [True, False])
def test_two_experts_are_those_of_phi_moe(draws: bool) -> None:
    """Those of transformers with the same seed, and gradients of weights. A drawn one weighs a third of it at times,
    which of the second is drawn anew there."""
    # Two seconds, which only the process that runs this test shall spend.
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.randn(200, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
    torch.manual_seed(1)
    weights, chosen = sparsely_mixed(logits, 0.3, draws=draws)
    torch.manual_seed(1)
    theirs, experts = sparsemixer(logits, 0.3, draws)
    found = weights.gather(1, experts)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, experts, True))
    torch.testing.assert_close(found[:, 0], theirs[:, 0])
    upstream = torch.randn_like(found)
    gradients = (torch.autograd.grad(one, logits, upstream)[0] for one in (found, theirs))
    torch.testing.assert_close(*gradients)
    ratio = (found / theirs)[:, 1]
    assert torch.isclose(ratio[:, None], torch.tensor([1.0, 3.0, 1 / 3] if draws else [1.0]), rtol=1e-3).any(1).all()


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.7, 9.0])
def test_tokens_within_the_capacity_are_those_of_the_engine(factor: float) -> None:
    logits = 2.0 * torch.randn(96, 6, generator=torch.Generator().manual_seed(5)) + torch.arange(6)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(2).indices, True)
    weights = logits.softmax(-1) * chosen
    kept = preferred(weights, 2, Capacity(factor, "probs")) & chosen
    of_engine = apply_router_token_dropping(weights, chosen, router_topk=2, capacity_factor=factor)
    assert torch.equal(weights * kept, of_engine[0])
    assert torch.equal(kept, of_engine[1])
    first = preferred(weights, 2, Capacity(factor, "position")) & chosen
    assert torch.equal(first, chosen & (chosen.cumsum(0) <= math.ceil(96 * 2 / 6 * factor)))


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 5, 0]])
def test_each_row_has_the_bias_of_its_expert_times_its_weight(counts: list[int]) -> None:
    bias, weights = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.rand(5, dtype=torch.float64)
    whose = torch.arange(3).repeat_interleave(torch.tensor(counts))
    weights.requires_grad_()
    rows, expected = rows_of_biases(bias, torch.tensor(counts), 5, weights), bias[whose] * weights.unsqueeze(1)
    torch.testing.assert_close(rows, expected)
    upstream = torch.randn_like(rows)
    gradients = (torch.autograd.grad(one, (bias, weights), upstream) for one in (rows, expected))
    torch.testing.assert_close(*gradients)
    assert torch.equal(rows_of_biases(bias, torch.tensor(counts), 5), bias[whose])


def test_weights_of_experts_are_rounded_with_what_they_multiply() -> None:
    """Once: a weight that is rounded before has 2^-8 more of an error."""
    experts: Any = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(experts)
    experts.config = SimpleNamespace(
        **{"gated_linear_unit": True, "activation_func": lambda gate: gate, "bias_activation_fusion": False},
        **{"activation_func_clamp_value": None, "glu_linear_offset": 0.0, "moe_apply_probs_on_input": False},
    )
    seen: list[torch.Tensor] = []
    # Gate and up projection side by side; what the second matrix is given comes back.
    experts.linear_fc1 = lambda tokens, counts: torch.cat((tokens, torch.full_like(tokens, 1.5)), dim=-1)
    experts.linear_fc2 = lambda hidden, counts, weights: seen.append(hidden) or hidden
    tokens = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = torch.rand(50, generator=torch.Generator().manual_seed(1))
    experts(tokens, torch.tensor([50]), weights)
    gated = (tokens * 1.5).double()  # in 16 bits, as the activation is
    assert seen[0].dtype == torch.bfloat16
    assert torch.equal(seen[0], (gated * weights.double()[:, None]).float().bfloat16())
    assert math.isfinite(float(seen[0].sum()))


@pytest.mark.parametrize("gated", [False, True])
def test_experts_matrices_have_the_engines_marks(gated: bool) -> None:
    """The dimension that tensor-parallel ranks divide, after that of the experts; and whose gradients are added: those
    of ranks with the same experts, where these are others than the ranks with the same weights."""
    config: Any = SimpleNamespace(moe_grouped_gemm=False, use_cpu_initialization=True, params_dtype=torch.float32)

    def marks(divided: int, **sizes: int) -> tuple[Any, ...]:
        groups: Any = SimpleNamespace(
            **{name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()}
        )
        built = compute.ExpertMatrices(range(2, 5), 4, 6, divided=divided, gated=gated, config=config, groups=groups)
        weight: Any = built.weight
        assert weight.shape == (3, 4, 6)
        return weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride, weight.allreduce

    stride = 2 if gated else 1
    assert marks(0, ep=1, expt_tp=2, tp=2) == (True, 1, stride, True)
    assert marks(1, ep=2, expt_tp=2, tp=2) == (True, 2, stride, False)
    assert marks(1, ep=1, expt_tp=1, tp=2) == (True, 2, stride, False)


@pytest.mark.parametrize("gated", [False, True])
def test_experts_are_as_wide_as_the_ranks_that_divide_experts_leave(gated: bool) -> None:
    """Of 12 on 3 ranks each has 4, whoever divides the other layers; the second rank's experts are the next two."""
    config: Any = SimpleNamespace(
        add_bias_linear=False,
        moe_ffn_hidden_size=12,
        hidden_size=6,
        gated_linear_unit=gated,
        moe_grouped_gemm=False,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )
    sizes = {"ep": 2, "expt_tp": 3, "tp": 2}
    groups: Any = SimpleNamespace(
        **{name: SimpleNamespace(size=lambda size=size: size, rank=lambda: 1) for name, size in sizes.items()}
    )
    experts = GroupedExperts(2, config, pg_collection=groups)
    assert experts.local_experts == range(2, 4)
    assert experts.linear_fc1.weight.shape == (2, 8 if gated else 4, 6)
    assert experts.linear_fc2.weight.shape == (2, 6, 4)


@pytest.mark.parametrize("packed", [False, True])
def test_no_mask_of_padding_is_handed_to_a_router(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's z-loss leaves out the tokens of such a mask, its balancing loss all others."""
    masks: list[Any] = []
    routing = TopKRouter.routing

    def recorded(router: TopKRouter, logits: torch.Tensor, *masked: Any, **named: Any) -> Any:
        masks.extend([*masked, *named.values()])
        return routing(router, logits, *masked, **named)

    monkeypatch.setattr(TopKRouter, "routing", recorded)
    mixture = {"num_experts": 4, "moe_z_loss_coeff": 0.1, "moe_aux_loss_coeff": (0.1,), "moe_router_topk": 2}
    config = small_config({**LLAMA, **mixture, "num_layers": 2, "num_query_groups": 2, "hidden_dropout": 0.0})
    [model], _ = build_small_model(config)
    ids = torch.arange(16).view(1, 16)
    positions = ids % 8 if packed else ids
    model(ids, positions, None, labels=ids, loss_mask=torch.ones(1, 16))
    assert masks == [None] * 2
