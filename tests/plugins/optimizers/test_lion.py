"""Lion's update is the paper's, exactly, wherever in a tensor an element lies."""

from fractions import Fraction

import pytest
import torch

from megatron_ext.plugins.migrate.translate import translate
from megatron_ext.plugins.optimizers.lion import Lion


def _update_of_the_paper(
    weights: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, lr: float, betas: tuple, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 2, line by line: c_t, theta_t and m_t from theta_{t-1}, g_t and m_{t-1}."""
    beta1, beta2 = betas
    interpolated = beta1 * momentum + (1 - beta1) * gradient
    weights = weights - lr * (interpolated.sign() + decay * weights)
    return weights, beta2 * momentum + (1 - beta2) * gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_update_is_the_papers_to_the_bit(decay: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weights = torch.randn(5, 37, dtype=dtype, requires_grad=True)
    lion = Lion([weights], lr=3e-3, betas=(0.9, 0.97), weight_decay=decay)
    expected, momentum = weights.detach().clone(), torch.zeros(5, 37, dtype=dtype)
    for _ in range(6):
        weights.grad = torch.randn(5, 37, dtype=dtype)
        weights.grad[0] = 0.0
        expected, momentum = _update_of_the_paper(expected, weights.grad, momentum, 3e-3, (0.9, 0.97), decay)
        lion.step()
        assert torch.equal(weights, expected)
        assert torch.equal(lion.state[weights]["exp_avg"], momentum)
    assert list(lion.state[weights]) == ["exp_avg"]


def test_the_update_is_that_of_exact_arithmetic() -> None:
    """With fractions of powers of two, which nothing rounds."""
    lr, decay, (beta1, beta2) = Fraction(1, 8), Fraction(1, 2), (Fraction(3, 4), Fraction(1, 2))
    exact = [Fraction(n, 4) for n in (-5, -1, 0, 3, 8)]
    gradients = [[Fraction(n, 2) for n in row] for row in ((3, -1, 0, 0, -2), (-8, 4, 0, 1, 3))]
    momenta = [Fraction(0)] * 5
    weights = torch.tensor([float(value) for value in exact], requires_grad=True)
    lion = Lion([weights], lr=float(lr), betas=(float(beta1), float(beta2)), weight_decay=float(decay))
    for row in gradients:
        for index, gradient in enumerate(row):
            direction = beta1 * momenta[index] + (1 - beta1) * gradient
            sign = (direction > 0) - (direction < 0)
            exact[index] -= lr * (sign + decay * exact[index])
            momenta[index] = beta2 * momenta[index] + (1 - beta2) * gradient
        weights.grad = torch.tensor([float(gradient) for gradient in row])
        lion.step()
    assert [Fraction(value) for value in weights.tolist()] == exact
    assert [Fraction(value) for value in lion.state[weights]["exp_avg"].tolist()] == momenta


def test_a_shard_is_updated_as_it_is_in_the_whole() -> None:
    """Wherever ranks cut: in the vectors that a CPU computes with, elements have other places then."""
    torch.manual_seed(2)
    whole, gradients = torch.randn(1003), [torch.randn(1003) for _ in range(3)]
    for first, last in ((0, 1003), (1, 1003), (5, 402), (997, 1003), (7, 7)):
        together, alone = whole.clone(), whole[first:last].clone()
        lion = Lion([{"params": [together]}, {"params": [alone]}], lr=1e-2, weight_decay=0.3)
        for gradient in gradients:
            together.grad, alone.grad = gradient, gradient[first:last].clone()
            lion.step()
        assert torch.equal(together[first:last], alone)


def test_nothing_moves_where_there_is_neither_gradient_nor_momentum() -> None:
    """Rows of padded vocabulary are zero and stay zero; a tensor without gradient gets no state."""
    padded, idle = torch.zeros(3), torch.ones(3)
    lion = Lion([padded, idle], lr=0.1, weight_decay=0.1)
    padded.grad = torch.zeros(3)
    lion.step()
    assert padded.tolist() == [0.0, 0.0, 0.0]
    assert idle.tolist() == [1.0, 1.0, 1.0]
    assert idle not in lion.state


def test_a_closure_computes_the_gradients() -> None:
    weights = torch.tensor([2.0], requires_grad=True)
    lion = Lion([weights], lr=0.5)

    def closure() -> float:
        loss = (weights**2).sum()
        loss.backward()
        return loss.item()

    assert lion.step(closure) == 4.0
    assert weights.item() == 1.5


def test_deepspeeds_own_betas_go_along_where_the_file_names_none() -> None:
    command = translate("deepspeed", {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}).command
    betas = {"--lion-beta1": "0.9", "--lion-beta2": "0.999"}  # FusedLion's, of deepspeed 0.19.8
    assert {flag: value for flag, value in command.items() if flag.startswith("--lion")} == betas
