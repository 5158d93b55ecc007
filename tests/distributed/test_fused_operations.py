"""--linear-cross-entropy and --gradient-accumulation-fusion train as what they stand for does, alone and divided."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.model.linear_cross_entropy import Vocabulary, linear_cross_entropy
from megatron_ext.plugins.prove.cases import Case
from megatron_ext.plugins.prove.parity import Experiment, compare, write_corpus
from megatron_ext.train.extensions import Extensions
from tests.support.small_models import small_config

LOSS, PRODUCTS = "--linear-cross-entropy", "--gradient-accumulation-fusion"
TP2 = "--tensor-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "loss": ("tied", 1, LOSS),
    "loss, TP2 SP": ("untied", 2, f"{LOSS} {TP2} --sequence-parallel"),
    "products, TP2": ("tied", 2, f"{PRODUCTS} {TP2}"),
    "both, DP2 overlapped": ("untied", 2, f"{LOSS} {PRODUCTS} {OVERLAP}"),
    "both, PP2": ("tied", 2, f"{LOSS} {PRODUCTS} --pipeline-model-parallel-size 2"),
    "loss, FSDP2": ("untied", 2, f"{LOSS} --use-torch-fsdp2"),
}
"""Model, ranks, flags."""
REPEATED = {"loss", "products, TP2"}  # of which others have each half


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return Experiment(write_corpus(tmp_path_factory.mktemp("corpus")), steps=2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in LAYOUTS]
)
def test_fused_operations_train_as_plain_ones(name: str, experiment: Experiment) -> None:
    model, ranks, flags = LAYOUTS[name]
    case = Case(name, model, ranks, tuple(flags.split()))
    assert compare(experiment.reference(model), experiment.train(case)).problems() == []


ROWS, HIDDEN, TOKENS = 96, 24, 50


def _inputs(true_rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (TOKENS, ROWS))
    labels = torch.randint(0, true_rows, (TOKENS,), generator=generator)
    return hidden, weight, labels, (torch.rand(TOKENS, generator=generator) < 0.7).float()


def _divided(true_rows: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Loss, gradient of the hidden states over all ranks, and of this rank's rows, for each size of the vocabulary."""
    torch.distributed.init_process_group("gloo")
    group: Any = torch.distributed.group.WORLD
    results = []
    for rows in true_rows:
        hidden, weight, labels, counts = _inputs(rows)
        own = weight.chunk(group.size())[group.rank()].clone().requires_grad_()
        vocabulary = Vocabulary(max(0, rows - len(own) * group.rank()), group)
        loss = linear_cross_entropy(hidden.requires_grad_(), own, labels, counts, vocabulary, chunk=16)
        loss.backward()
        torch.distributed.all_reduce(hidden.grad, group=group)  # pyright: ignore[reportArgumentType]
        results.append((loss.detach(), hidden.grad, own.grad))
    return results


def test_a_divided_vocabulary_is_exact() -> None:
    """Against float64; of 30 true rows the second rank has none."""
    sizes = (ROWS, 83, 30)
    first, second = run_ranks(2, _divided, sizes)
    for rows, (loss, for_hidden, upper), (other_loss, _, lower) in zip(sizes, first, second, strict=True):
        assert torch.equal(loss, other_loss)
        hidden, weight, labels, counts = _inputs(rows)
        hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
        exact = (F.cross_entropy(hidden @ weight[:rows].t(), labels, reduction="none") * counts).sum()
        exact.backward()
        assert float(loss) == pytest.approx(exact.item(), rel=3e-7)
        assert _error(for_hidden, hidden.grad) < 2e-6
        assert _error(torch.cat((upper, lower)), weight.grad) < 2e-6


def _error(got: torch.Tensor, expected: Any) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def test_a_loss_of_ones_own_is_refused() -> None:
    """It is given logits, and there are none."""
    config = small_config(training={"linear_cross_entropy": True})
    with pytest.raises(ConfigurationError, match="leave --linear-cross-entropy out"):
        Extensions(loss=lambda logits: logits.cross_entropy()).applied(config)
