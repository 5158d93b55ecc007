"""Mixtures of experts: auxiliary losses from their definitions, in every layout, and checkpoints between layouts."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.resaving import Saved, assert_same_tensors, saved_by
from tests.support.selection import chosen

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --seq-length 16 --max-position-embeddings 16 --mock-data --vocab-size 61
    --make-vocab-size-divisible-by 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 12 --lr 1e-3
    --eval-interval 0 --init-method-std 0.1 --hidden-dropout 0 --attention-dropout 0 --disable-bias-linear
    --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 32 --device cpu
""")
BALANCE, Z = 0.3, 0.02
LOSSES = ["--moe-aux-loss-coeff", str(BALANCE), "--moe-z-loss-coeff", str(Z)]
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


def _by_the_program(flags: list[str]) -> tuple[dict[str, np.ndarray], float, float]:
    """First gradients by name, load-balancing loss and z-loss of a training step."""
    from megatron_ext import device
    from megatron_ext.plugins.prove import gather
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(flags).config, device.install("cpu"))
    gradients: list[Any] = []
    prepare_grads = run.optimizer.prepare_grads

    def capture_then_prepare() -> bool:
        gradients.extend(gather.gradients(run))
        return prepare_grads()

    run.optimizer.prepare_grads = capture_then_prepare
    found = Trainer(run, []).step().numbers
    return {shard.name: shard.values for shard in gradients}, found["load_balancing_loss"], found["z_loss"]


def _by_hand(flags: list[str]) -> tuple[dict[str, np.ndarray], float, float]:
    """The same from a model without auxiliary losses: its routers' logits, the formulas, and autograd.

    Load balancing: experts x the sum over experts of (share of the tokens' choices) x (mean probability), Fedus et
    al. 2021 (arXiv:2101.03961), equations 4 to 6. Z-loss: the mean of logsumexp(logits)^2, Zoph et al. 2022
    (arXiv:2202.08906), equation 5.
    """
    from megatron.core.utils import unwrap_model

    from megatron_ext import device
    from megatron_ext.config.derived.batch_size import num_microbatches
    from megatron_ext.model.names import by_expert, global_named_parameters
    from megatron_ext.parts.experts.router import Router
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    run = build_run(configure(flags).config, device.install("cpu"))
    logits: list[torch.Tensor] = []
    route = Router.routing

    def keeping_logits(self: Any, given: torch.Tensor, **options: Any) -> Any:
        logits.append(given.flatten(0, -2))
        return route(self, given, **options)

    Router.routing = keeping_logits  # pyright: ignore[reportAttributeAccessIssue]
    [model] = unwrap_model(run.chunks)
    batches = run.loaders.train.global_batch(0, num_microbatches(run.config, 4))
    loss, tokens, balance, z = torch.zeros(()), 0, torch.zeros(()), torch.zeros(())
    for batch in batches:
        assert batch.loss_mask is not None
        loss = loss + (model(batch.tokens, batch.position_ids, labels=batch.labels) * batch.loss_mask).sum()
        tokens += int(batch.loss_mask.sum())
    for of_layer in logits:
        chosen = torch.zeros_like(of_layer).scatter(1, of_layer.topk(2).indices, 1.0)
        share, probability = chosen.mean(0) / 2, of_layer.softmax(-1).mean(0)
        balance = balance + 4 * (share * probability).sum() / len(batches)
        z = z + of_layer.logsumexp(-1).square().mean() / len(batches)
    named = list(global_named_parameters([model]))
    total = loss / tokens + BALANCE * balance + Z * z
    gradients = torch.autograd.grad(total, [parameter for _, parameter in named])
    by_name = {
        name: tensor.numpy()
        for (stacked, _), gradient in zip(named, gradients, strict=True)
        for name, tensor in by_expert(stacked, gradient)
    }
    return by_name, float(balance) / 2, float(z) / 2


@pytest.fixture(scope="module")
def by_hand() -> tuple[dict[str, np.ndarray], float, float]:
    return run_ranks(1, _by_hand, FLAGS)[0]


LAYOUTS = {
    "one process": (1, ""),
    "EP2 PP2 DP2": (4, f"{EP2} --pipeline-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
    "TP2 SP, recomputed": (
        2,
        f"{TP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_auxiliary_losses_reach_the_total_loss(layout: str, by_hand: Any) -> None:
    world_size, words = LAYOUTS[layout]
    ranks = run_ranks(world_size, _by_the_program, [*FLAGS, *LOSSES, *words.split()])
    expected, balance, z = by_hand
    assert balance > 1.0
    for gradients, found_balance, found_z in ranks:
        assert found_balance == pytest.approx(balance, rel=1e-6)
        assert found_z == pytest.approx(z, rel=1e-6)
        for name, gradient in gradients.items():
            if name.endswith("router.weight") or world_size == 1:  # every rank has the whole router
                difference = np.linalg.norm(gradient - expected[name])
                assert difference < 1e-5 * np.linalg.norm(expected[name]), name


BIASED = shlex.split("""
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.03
    --moe-router-load-balancing-type none --moe-shared-expert-gate
""")


def _biases(flags: list[str]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The biases of experts after three steps, and what the tokens that this process routed make of them."""
    from megatron_ext import device
    from megatron_ext.model.names import biases_of_experts
    from megatron_ext.parts.experts.router import Router
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(flags).config, device.install("cpu"))
    counts: dict[int, torch.Tensor] = {}
    route = Router.routing

    def counting(self: Any, logits: torch.Tensor, **options: Any) -> Any:
        weights, chosen = route(self, logits, **options)
        counts[self.layer_number] = counts.get(self.layer_number, torch.zeros(4)) + chosen.sum(0)
        return weights, chosen

    Router.routing = counting  # pyright: ignore[reportAttributeAccessIssue]
    trainer, by_hand = Trainer(run, []), {1: torch.zeros(4), 2: torch.zeros(4)}
    for _ in range(3):
        counts.clear()
        trainer.step()
        for layer, load in counts.items():
            by_hand[layer] += 0.03 * torch.sign(load.mean() - load)
    found = {name: bias.tolist() for name, bias in biases_of_experts(run.chunks)}
    assert all(bias.dtype == torch.float32 for _, bias in biases_of_experts(run.chunks))
    return found, {
        f"decoder.layers.{layer - 1}.mlp.router.expert_bias": bias.tolist() for layer, bias in by_hand.items()
    }


BIASED_LAYOUTS = {
    "EP2 PP2 DP2": (4, f"{EP2} --pipeline-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
    "TP2 SP EP2, distributed optimizer": (4, f"{TP2} {EP2} --use-distributed-optimizer"),
    "CP2 EP2, recomputed": (
        2,
        f"--context-parallel-size 2 {EP2} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "EP2 ZeRO-3": (2, f"{EP2} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
}


@pytest.mark.full
def test_the_bias_of_experts_follows_the_load_of_the_global_batch() -> None:
    """Wang et al. 2024 (arXiv:2408.15664), algorithm 1: a step of one size towards experts with fewer tokens than the
    mean. It is the same on all ranks of a layer, whatever the layout."""
    [(alone, by_hand)] = run_ranks(1, _biases, [*FLAGS, *BIASED])
    assert alone == {name: pytest.approx(bias, abs=1e-7) for name, bias in by_hand.items()}
    assert all(len({*bias}) > 1 for bias in alone.values())
    for world_size, words in BIASED_LAYOUTS.values():
        for found, _ in run_ranks(world_size, _biases, [*FLAGS, *BIASED, *words.split()]):
            assert found
            assert found.items() <= alone.items(), words


def test_the_bias_of_experts_stays_fp32_in_a_bf16_model() -> None:
    """Where it does not, steps of 0.03 are rounded to 8 bits: sums of them in fp32 are other numbers."""
    for found, _ in run_ranks(2, _biases, [*FLAGS, *BIASED, *EP2.split(), "--bf16", "--use-distributed-optimizer"]):
        steps = [value / 0.03 for bias in found.values() for value in bias]
        assert steps == pytest.approx([round(step) for step in steps], abs=1e-5)


FOUR_STAGES = "--pipeline-model-parallel-size 4"


@pytest.fixture(scope="module")
def flags(request: pytest.FixtureRequest) -> list[str]:
    """With as many layers as the most stages that are asked for."""
    layers = ["--num-layers", "4"] if FOUR_STAGES in chosen(request, "layout") else []
    return [*FLAGS, *BIASED, *layers]


@pytest.fixture(scope="module")
def saved(flags: list[str], pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """By two copies of every expert, which divide the optimizer's state; with --all in two stages, too."""
    layout = f"{EP2} --use-distributed-optimizer --overlap-grad-reduce"
    stages = (8, f"{layout} --pipeline-model-parallel-size 2")
    divided = stages if pytestconfig.getoption("--all") else (4, layout)
    return saved_by(divided, flags, None, tmp_path_factory.mktemp("saved"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        # Slow are those that divide what the others divide, or less.
        pytest.param(1, "", marks=pytest.mark.slow),
        (2, f"{TP2} --expert-tensor-parallel-size 1 {EP2} --moe-token-dispatcher-type alltoall"),
        (2, "--pipeline-model-parallel-size 2"),
        pytest.param(2, TP2, marks=pytest.mark.slow),
        pytest.param(4, "--expert-model-parallel-size 4 --use-distributed-optimizer", marks=pytest.mark.slow),
        pytest.param(4, f"{TP2} {EP2} --use-distributed-optimizer", marks=pytest.mark.slow),
        pytest.param(4, FOUR_STAGES, marks=pytest.mark.slow),
    ],
)
def test_layouts_share_checkpoints(ranks: int, layout: str, flags: list[str], saved: Saved, tmp_path: Path) -> None:
    found = saved_by((ranks, layout), flags, saved.folder, tmp_path)
    assert_same_tensors(found, saved)
    assert any(".experts.experts." in name for name in found.tensors)
    biases = [tensor for name, tensor in found.tensors.items() if name.endswith(".router.expert_bias")]
    assert biases
    assert all(bias.dtype == torch.float32 and bias.any() for bias in biases)
    assert found.losses == pytest.approx(saved.losses, rel=1e-6)


@pytest.mark.full
def test_layouts_share_checkpoints_of_experts_with_biases(tmp_path: Path) -> None:
    """Of ranks that divide every expert, and all of which have the bias of its second matrix; read by ranks that have
    whole ones."""
    start = FLAGS.index("--moe-shared-expert-intermediate-size")
    flags = [flag for flag in FLAGS[:start] + FLAGS[start + 2 :] if flag != "--disable-bias-linear"]
    saved = saved_by((2, TP2), flags, None, tmp_path / "one")
    found = saved_by((2, EP2), flags, saved.folder, tmp_path / "other")
    assert_same_tensors(found, saved)
    kept = [name for name in ("linear_fc1", "linear_fc2") for key in found.tensors if f"experts.{name}.bias" in key]
    assert {*kept} == {"linear_fc1", "linear_fc2"}
    assert all(found.tensors[key].any() for key in found.tensors if key.endswith("bias") and "optimizer" not in key)
    assert found.losses == pytest.approx(saved.losses, rel=1e-6)


def _dropped(flags: list[str]) -> float:
    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.expert_load import ExpertLoad
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    experts = ExpertLoad()
    trainer = Trainer(build_run(configure(flags).config, device.install("cpu")), [experts])
    trainer.step()
    loads = experts.read(trainer).row["expert_load"]
    return sum(layer["dropped"] for layer in loads) / len(loads)


@pytest.mark.first("probs")
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_the_share_of_dropped_tokens_is_that_of_one_process(policy: str) -> None:
    """Of 16 tokens with 2 of 4 experts each an expert takes 4 at most: at least half of all is left out."""
    flags = [*FLAGS, "--moe-expert-capacity-factor", "0.5", "--moe-token-drop-policy", policy]
    layouts = [(4, f"{EP2} --pipeline-model-parallel-size 2"), (2, TP2), (2, "--context-parallel-size 2")]
    [alone] = run_ranks(1, _dropped, flags)
    assert 0.5 <= alone < 0.7
    for world_size, words in layouts if policy == "probs" else layouts[:2]:
        everyones = run_ranks(world_size, _dropped, [*flags, *words.split()])
        assert everyones == [pytest.approx(alone, rel=1e-6)] * world_size, words
    assert run_ranks(1, _dropped, FLAGS) == [0.0]


def _messages_of_a_step(flags: list[str]) -> tuple[dict[str, int], dict[str, float]]:
    """The collectives of a training step on two ranks, without the sums, and those of tokens by the planner."""
    from benchmarks.traffic import Traffic
    from megatron_ext import device
    from megatron_ext.cost.traffic import sent as planned
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(flags).config, device.install("cpu"))
    with Traffic() as traffic:
        Trainer(run, []).step()
    of_tokens = {term.collective: term.calls for term in planned(run.config, 0) if term.axis == "ep"}
    return {kind: sent.calls for (kind, _), sent in traffic.sent.items() if kind != "all-reduce"}, of_tokens


@pytest.mark.parametrize(
    ("dispatcher", "of_layer"),
    [("allgather", {"all-to-all": 4}), ("alltoall", {"all-gather": 1, "all-to-all": 4})],
)
def test_tokens_and_weights_travel_together(dispatcher: str, of_layer: dict[str, int]) -> None:
    """To the experts and back, forward and backward; what is sent all-to-all needs its sizes before."""
    flags = [*FLAGS, *EP2.split(), "--moe-token-dispatcher-type", dispatcher, "--global-batch-size", "2"]
    layers = 2
    for sent, of_tokens in run_ranks(2, _messages_of_a_step, flags):
        assert sent == {kind: layers * calls for kind, calls in of_layer.items()}
        assert of_tokens == {"all-to-all": sent["all-to-all"]}


def _sums_of_parts(dtype: str) -> tuple[list[float], ...]:
    """A gradient of gathered rows and rows that are added up, next to gloo's reduce-scatter."""
    from megatron_ext import device
    from megatron_ext.parts.experts.exchange import added, gathered

    device.install("cpu")
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    assert group is not None
    torch.manual_seed(group.rank())
    parts = torch.randn(group.size() * 4, 16).mul(1e4).to(getattr(torch, dtype))
    rows = parts[:4].clone().requires_grad_()
    reference, whole = torch.empty_like(parts[:4]), torch.empty_like(parts)
    torch.distributed.reduce_scatter_tensor(reference, parts.clone(), group=group)
    torch.distributed.all_gather_into_tensor(whole, parts[:4].contiguous(), group=group)
    arrived = gathered(rows, group)
    arrived.backward(parts)
    assert torch.equal(arrived, whole)
    summed = parts.clone().requires_grad_()
    total = added(summed, group)
    total.backward(parts[:4])
    assert rows.grad is not None
    assert summed.grad is not None
    assert torch.equal(summed.grad, whole)
    return reference.flatten().tolist(), rows.grad.flatten().tolist(), total.flatten().tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_tokens_are_added_as_gloo_adds_them(ranks: int, dtype: str) -> None:
    for reference, gradient, total in run_ranks(ranks, _sums_of_parts, dtype):
        assert reference == gradient == total
