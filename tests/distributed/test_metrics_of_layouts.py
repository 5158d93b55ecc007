"""What is counted next to the loss is the same in every layout, an evaluation changes nothing, and what bf16 computes
is right by value."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parallel.rows import local_part
from megatron_ext.plugins.prove import gather
from megatron_ext.train.callbacks.evaluation import evaluate
from megatron_ext.train.callbacks.parameters_norm import parameters_norm
from megatron_ext.train.gradient_watch import _before_other_uses
from megatron_ext.train.trainer import Callback, Trainer
from tests.support.checkpoints import build
from tests.support.program import tiny
from tests.support.several_models import in_turn
from tests.support.small_models import LLAMA, build_small_model, small_config

# Of the second tier: tests/parity/test_matrix.py compares losses and norms.
pytestmark = pytest.mark.full

FLAGS = tiny("""
    --position-embedding-type rope --train-iters 10 --lr 1e-2 --attention-dropout 0 --hidden-dropout 0
    --log-num-zeros-in-grad --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights
""")
LAYOUTS = (
    "",
    "--use-distributed-optimizer",
    "--use-torch-fsdp2",
    "--tensor-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--context-parallel-size 2",
    "--pipeline-model-parallel-size 2",
)
FP32 = 2.0**-24
Found = dict[tuple[str, str], Any]
"""What one rank computed, by what was asked and flags."""


def _counted(layout: str) -> list[Any]:
    """What two steps count; the zeros among the gradients are as many in every layout, too."""
    run = build([*FLAGS, *layout.split()])
    trainer, found = Trainer(run, []), []
    for _ in range(2):
        result = trainer.step()
        found.append((result.tokens, result.global_batch_size, result.num_zeros))
    state = run.state
    run.loaders.close()
    return [*found, state.iteration, state.consumed_samples, state.consumed_tokens, state.scheduled_samples]


def test_counts_do_not_depend_on_the_layout(alone: Found, divided: list[Found]) -> None:
    expected = alone["counted", ""]
    assert expected[0][:2] == (4 * 16, 4)
    assert expected[2:] == [2, 8, 2 * 4 * 16, 8]
    for rank in divided:
        for layout in LAYOUTS:
            assert rank["counted", layout] == expected, layout


EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.3 --moe-z-loss-coeff 0.02 --micro-batch-size 2"
)
TIED = "--untie-embeddings-and-output-weights=false"
OF_EXPERTS = (
    f"{EXPERTS} --expert-model-parallel-size 2",
    f"{EXPERTS} --context-parallel-size 2",
    f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel",
    f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--moe-token-dispatcher-type alltoall",
    f"{EXPERTS} --use-distributed-optimizer --context-parallel-size 2 --expert-model-parallel-size 2",
)
OF_SAMPLES = f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss"
BIASED = f"{EXPERTS} --disable-bias-linear=false --moe-aux-loss-coeff 0"
OF_BIASED = tuple(
    f"{BIASED} {layout}"
    for layout in (
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        "--moe-token-dispatcher-type alltoall",
        "--expert-model-parallel-size 2",
        "--expert-model-parallel-size 2 --use-distributed-optimizer",
        "--expert-model-parallel-size 2 --use-megatron-fsdp",
    )
)
PADDED = "--make-vocab-size-divisible-by 128 --lm-head-bias"
OF_PADDED = tuple(
    f"{PADDED} {layout}"
    for layout in (
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--use-distributed-optimizer",
        "--use-torch-fsdp2",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    )
)
UNBALANCED = "--num-experts 4 --moe-ffn-hidden-size 24"
TIED_ENDS = (
    f"{TIED} --pipeline-model-parallel-size 2",
    f"{TIED} --tensor-model-parallel-size 2",
    f"{TIED} --use-torch-fsdp2",
)
INDEXED = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --experimental-attention-variant dsa --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 12 "
    "--dsa-indexer-topk 6 --init-method-std 0.1"
)
OF_INDEXERS = tuple(
    f"{INDEXED} {layout}"
    for layout in (
        "--use-distributed-optimizer",
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--context-parallel-size 2 --cp-comm-type all_gather",
        "--pipeline-model-parallel-size 2",
    )
)
ALONE = (
    *(EXPERTS, OF_SAMPLES, TIED, f"{TIED} --bf16", f"{TIED} --fp16 --initial-loss-scale 65536", UNBALANCED),
    *(INDEXED, f"{INDEXED} --recompute-granularity selective", BIASED, PADDED),
)
DIVIDED = {
    **dict.fromkeys(OF_EXPERTS, EXPERTS),
    f"{OF_SAMPLES} --context-parallel-size 2": OF_SAMPLES,
    **dict.fromkeys(TIED_ENDS, TIED),
    **dict.fromkeys(OF_INDEXERS, INDEXED),
    **dict.fromkeys(OF_BIASED, BIASED),
    **dict.fromkeys(OF_PADDED, PADDED),
}
"""Layouts of two ranks, and what is the same alone."""


@dataclass(frozen=True)
class Measured:
    """Norms of all weights and of the first gradients, the zeros among these, the norm of the weights that two updates
    leave (biases are 0 before), and what the routers and indexers of a step add to the loss."""

    weights: float
    gradients: float
    zeros: float
    updated: float
    balance: float | None
    z: float | None
    z_of_next_step: float | None
    indexer: float | None
    exact: float
    """The norm of this rank's weights by themselves, in fp64."""


def _measured(layout: str) -> Measured:
    run = build([*FLAGS, *layout.split()])
    weights = [local_part(weight).detach() for chunk in run.chunks for weight in chunk.parameters()]
    squares = [weight.double().square().sum() for weight in weights]
    norm, trainer = parameters_norm(run), Trainer(run, [])
    first, second = trainer.step(), trainer.step()
    updated = parameters_norm(run)
    run.loaders.close()
    assert first.grad_norm is not None
    assert first.num_zeros is not None
    exact = float(torch.stack(squares).sum().sqrt())
    found = first.numbers.get
    balance = found("load_balancing_loss", found("seq_load_balancing_loss"))
    norms = (norm, first.grad_norm, first.num_zeros, updated)
    return Measured(*norms, balance, found("z_loss"), second.numbers.get("z_loss"), found("indexer_loss"), exact)


def test_norms_and_auxiliary_losses_do_not_depend_on_the_layout(alone: Found, divided: list[Found]) -> None:
    """Weights that ranks hold together count once, be they divided, whole, tied, or experts; losses are means. A loss
    scale, and 16 bits, change gradients by their roundings alone."""
    known = {layout: alone["measured", layout] for layout in ALONE}
    experts, of_samples, tied, in_bf16, in_fp16, unbalanced, indexed, recomputed, _, padded = known.values()
    assert padded.zeros < 61 * 32, "padding is none of them"
    for one in known.values():
        assert one.weights == pytest.approx(one.exact, rel=1e-6), "in fp64, of 16-bit weights too"
    assert (experts.balance or 0.0) > 1.0
    assert (of_samples.balance or 0.0) > 0.0
    assert experts.z_of_next_step == pytest.approx(experts.z, rel=0.3), "of one step"
    assert (unbalanced.balance, unbalanced.z, unbalanced.indexer) == (None, None, None)
    assert (indexed.indexer or 0.0) > 1e-3
    assert recomputed == indexed, "counted once"
    for one in (in_bf16, in_fp16):
        assert one.gradients == pytest.approx(tied.gradients, rel=2.0**-6)
    for rank in divided:
        for layout, same_alone in DIVIDED.items():
            expected, found = known[same_alone], rank["measured", layout]
            same = dataclasses.astuple(dataclasses.replace(found, exact=expected.exact))
            numbers = [value or 0.0 for value in dataclasses.astuple(expected)]  # None of a dense model
            assert [value or 0.0 for value in same] == pytest.approx(numbers, rel=1e-5), layout
            assert found.weights == pytest.approx(expected.weights, rel=1e-6), layout
            assert found.zeros == expected.zeros, layout


def _losses_with_dropout(evaluations: str) -> tuple[list[str], list[str]]:
    """The losses of three steps, and those of evaluations in training and between the steps."""
    rates = "--attention-dropout 0.3 --hidden-dropout 0.3 --eval-interval 10 --eval-iters 1"
    run = build([*FLAGS, *rates.split()])
    assert run.loaders.valid is not None
    trainer, losses, evaluated = Trainer(run, []), [], []
    for _ in range(3):
        evaluated += [evaluate(run, run.loaders.valid).hex() for _ in range(int(evaluations))]
        losses.append(trainer.step().loss.hex())
    run.loaders.close()
    return losses, evaluated


def test_dropout_is_off_in_an_evaluation_and_on_after_it_as_if_there_had_been_none(alone: Found) -> None:
    (expected, _), (losses, evaluated) = alone["dropout", "0"], alone["dropout", "2"]
    assert losses == expected
    assert evaluated[::2] == evaluated[1::2], "no mask is drawn"
    assert len(set(evaluated)) == 3


def _loss_of_divided_logits(_: str) -> float:
    """How far the losses of TP2 in bf16 are from the fp64 cross-entropy of the same logits of both ranks."""
    layout = {"tensor_model_parallel_size": 2, "world_size": 2}
    config = small_config({**LLAMA, "padded_vocab_size": 256}, layout, {"bf16": True})
    [gpt], groups = build_small_model(config)
    tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16).expand(2, 16)
    losses = gpt(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    own: Any = gpt(tokens[:, :-1], positions, None)
    assert losses.dtype == torch.float32
    assert own.dtype == torch.bfloat16
    parts = [torch.empty_like(own) for _ in range(2)]
    torch.distributed.all_gather(parts, own.detach(), group=groups.tp)
    logits = torch.cat(parts, -1).double()
    exact = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(2, 16)
    return float((losses - exact).detach().abs().max())


def _masters_and_update(scheme: str) -> dict[str, float]:
    """One step in bf16 of two microbatches a rank. How far gradients, masters and weights are from what they must be,
    in the units that the test names."""
    lr, beta1, beta2, eps = 1e-2, 0.9, 0.95, 1e-8
    settings = "--bf16 --clip-grad 0 --weight-decay 0 --adam-beta2 0.95 --lr-decay-style constant"
    run = build([*FLAGS, *settings.split(), *scheme.split()])
    far: dict[str, float] = {"initial masters": 0.0, "gradients": 0.0, "masters": 0.0, "weights": 0.0, "compared": 0.0}
    of_microbatches: dict[Any, list[torch.Tensor]] = {}
    if not scheme:
        for chunk in run.chunks:
            for parameter in chunk.parameters():
                made = of_microbatches.setdefault(parameter, [])
                parameter.register_hook(lambda gradient, made=made: made.append(gradient.double()))
    pairs = [pair for part in run.sharding.parts(run.optimizer) for pair in part.main_parameters()]
    for _, main in pairs:
        assert main.dtype == torch.float32
        far["initial masters"] = max(far["initial masters"], float((main - main.bfloat16().float()).abs().max()))
    before: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Watch(Callback):
        def on_loss(self, trainer: Any, loss: Any) -> None:
            tokens = 4 * 16
            for weight, main in pairs:
                before.append((main.detach().double().clone(), main.grad.double().clone()))  # pyright: ignore
                if weight in of_microbatches:
                    made = torch.stack(of_microbatches[weight])
                    exact, sizes = made.sum(0), made.abs().sum(0)
                    torch.distributed.all_reduce(exact)
                    torch.distributed.all_reduce(sizes)
                    error = (main.grad.double() - exact / tokens).abs()  # pyright: ignore
                    units = error / (sizes / tokens * FP32).clamp(min=1e-30)
                    far["compared"] += 1
                    far["gradients"] = max(far["gradients"], float(units.max()))

    Trainer(run, [Watch()]).step()
    for (weight, main), (old, gradient) in zip(pairs, before, strict=True):
        average, square = (1 - beta1) * gradient, (1 - beta2) * gradient.square()
        step = lr * average / (1 - beta1) / ((square / (1 - beta2)).sqrt() + eps)
        units = (main.double() - (old - step)).abs() / (FP32 * (old.abs() + lr))
        far["masters"] = max(far["masters"], float(units.max()))
        if not scheme:
            far["weights"] = max(far["weights"], float((weight.float() - main.bfloat16().float()).abs().max()))
    run.loaders.close()
    return far


SCHEMES = (
    "--use-distributed-optimizer",
    "--use-torch-fsdp2",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    "--use-megatron-fsdp",
)


class _OwnGradients:
    """Adds up, in fp64, what this rank's microbatches give before anything is reduced, by name."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.made: dict[str, list[torch.Tensor]] = {}

    def register(self, chunk: Any) -> list[tuple[str, torch.nn.Parameter]]:
        parameters = list(global_named_parameters([chunk]))
        self.names |= {id(parameter): name for name, parameter in parameters}
        return parameters

    def watch(self, name: str, weight: torch.Tensor) -> None:
        made = self.made.setdefault(name, [])
        _before_other_uses(weight, lambda gradient: made.append(gradient.double().clone()))

    def before_reduction(self, parameters: Any) -> None:
        for parameter in parameters:
            self.made.setdefault(self.names[id(parameter)], []).append(parameter.main_grad.double().clone())


def _far_from_the_sum(scheme: str) -> dict[str, float]:
    """One step in bf16 of two microbatches a rank. By parameter, how far the reduced gradient is from the sum of all
    microbatches', in units of 2^-24 of the sum of their sizes."""
    run = build([*FLAGS, "--bf16", *scheme.split()])
    own, far = _OwnGradients(), {}
    for chunk in run.chunks:
        run.sharding.watch(chunk, own)

    class Watch(Callback):
        def before_update(self, trainer: Any) -> None:
            for shard in gather.gradients(run):
                made = torch.stack(own.made[shard.name])
                both = torch.stack((made.sum(0), made.abs().sum(0)))
                torch.distributed.all_reduce(both)
                exact, sizes = both / (4 * 16)
                error = (torch.from_numpy(shard.values).double() - exact).abs()
                far[shard.name] = float((error / (sizes * FP32).clamp(min=1e-30)).max())

    Trainer(run, [Watch()]).step()
    run.loaders.close()
    return far


UPDATED = ("", "--use-torch-fsdp2")
_COMPUTED = {
    "counted": _counted,
    "measured": _measured,
    "dropout": _losses_with_dropout,
    "loss": _loss_of_divided_logits,
    "update": _masters_and_update,
    "sum": _far_from_the_sum,
}


def _found(asked: tuple[str, str]) -> Any:
    what, flags = asked
    return _COMPUTED[what](flags)


def _on_ranks(ranks: int, asked: list[tuple[str, str]]) -> list[Found]:
    """By rank; all in one go, as what torch keeps of DTensor's operations takes each new process half a second."""
    return [dict(zip(asked, found, strict=True)) for found in run_ranks(ranks, in_turn, _found, asked)]


@pytest.fixture(scope="module")
def alone() -> Found:
    return _on_ranks(
        1, [("counted", ""), *(("measured", layout) for layout in ALONE), ("dropout", "0"), ("dropout", "2")]
    )[0]


@pytest.fixture(scope="module")
def divided() -> list[Found]:
    """What each of two ranks finds."""
    asked = {"counted": LAYOUTS, "measured": DIVIDED, "loss": [""], "update": UPDATED, "sum": SCHEMES}
    return _on_ranks(2, [(what, flags) for what, of_what in asked.items() for flags in of_what])


def test_the_loss_of_divided_bf16_logits_is_fp32(divided: list[Found]) -> None:
    """A sum of 250 exponentials, each rounded to fp32: 2^-24 of it for each; and 16 for two terms of up to 8."""
    for rank in divided:
        assert rank["loss", ""] < (250 + 16) * FP32


def test_masters_are_the_rounded_weights_and_are_updated_in_fp32(divided: list[Found]) -> None:
    """The update has some 8 roundings to fp32, of numbers up to the weight and the learning rate."""
    for rank in divided:
        for far in (rank["update", scheme] for scheme in UPDATED):
            assert far["initial masters"] == 0.0
            assert far["masters"] <= 8.0
            assert far["weights"] == 0.0


def test_bf16_gradients_are_added_in_fp32(divided: list[Found]) -> None:
    """Two microbatches on each of two ranks, and the division: 4 roundings to fp32 of the sum of their sizes, none of
    which changes most sums of so few 16-bit numbers."""
    for far in (rank["update", ""] for rank in divided):
        assert far["compared"] > 10
        assert far["gradients"] <= 4.0


def test_bf16_gradients_are_reduced_in_fp32_by_every_scheme(divided: list[Found]) -> None:
    """As above: 4 roundings to fp32. One to bf16 would be 2^16 of them."""
    for rank in divided:
        for scheme in SCHEMES:
            far = rank["sum", scheme]
            assert len(far) > 10
            assert max(far.values()) <= 4.0, scheme
