"""Schedule-free AdamW's weights and average are those of the authors' package, which keeps two sequences of three."""

import torch

from megatron_ext.plugins.optimizers.schedule_free import ScheduleFree


def test_twenty_updates_are_those_of_the_authors_package() -> None:
    """adamw_schedulefree.py of schedulefree 1.4, with a warmup of five updates and a smaller rate once, in fp64: y and
    z are kept, and the average is y + (z - y) (1 - 1 / beta1)."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(5, 7, dtype=torch.float64, generator=generator).requires_grad_()
    rate, (beta1, beta2), eps, decay = 1e-2, (0.9, 0.98), 1e-6, 0.1
    made = ScheduleFree([{"params": [weights], "lr": 0.0}], betas=(beta1, beta2), eps=eps, weight_decay=decay)
    y, z = weights.detach().clone(), weights.detach().clone()
    square, lr_max, weight_sum = torch.zeros_like(y), 0.0, 0.0
    for k in range(20):
        gradient = torch.randn(5, 7, dtype=torch.float64, generator=generator)
        lr = rate * min((k + 1) / 5, 1.0) * (0.5 if k == 10 else 1.0)
        lr_max = max(lr, lr_max)
        weight_sum += lr_max**2
        ckp1 = lr_max**2 / weight_sum
        square = beta2 * square + (1 - beta2) * gradient**2
        normalized = gradient / ((square / (1 - beta2 ** (k + 1))).sqrt() + eps) + decay * y
        y = y + (z - y) * ckp1 + lr * (beta1 * (1 - ckp1) - 1) * normalized
        z = z - lr * normalized
        weights.grad = gradient
        made.param_groups[0]["lr"] = lr
        made.step()
        torch.testing.assert_close(weights.detach(), y, rtol=1e-11, atol=1e-11)
        average = made.state[weights]["average"]
        torch.testing.assert_close(average, y + (z - y) * (1 - 1 / beta1), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(made.state[weights]["z"], z, rtol=1e-11, atol=1e-11)


def test_with_one_rate_the_average_is_the_mean_of_the_steps() -> None:
    weights = torch.linspace(-1, 1, 9).requires_grad_()
    made, steps = ScheduleFree([weights], lr=0.1), []
    for step in range(5):
        weights.grad = torch.linspace(1, 2, 9) * (step - 2)
        made.step()
        steps.append(made.state[weights]["z"].clone())
    torch.testing.assert_close(made.state[weights]["average"], torch.stack(steps).mean(0))


def test_a_factor_of_a_groups_rate_changes_no_share_of_its_average() -> None:
    """`scheduled_lr` is the rate without the group's factor; a rate of 0 leaves all as it is."""
    weights = torch.ones(3).requires_grad_()
    made = ScheduleFree([{"params": [weights], "lr": 0.0, "scheduled_lr": 0.5}])
    for _ in range(3):
        weights.grad = torch.ones(3)
        made.step()
    assert torch.equal(weights.detach(), torch.ones(3))
    assert float(made.state[weights]["summed_squares"]) == 0.75
