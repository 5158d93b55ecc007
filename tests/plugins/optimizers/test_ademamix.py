"""AdEMAMix's update is the paper's, with its schedulers, wherever in a tensor an element lies."""

import math

import torch

from megatron_ext.plugins.optimizers.ademamix import AdEMAMix, mixture


def test_twenty_updates_are_those_of_the_paper() -> None:
    """Algorithm 1 line by line, in fp64."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(5, 7, dtype=torch.float64, generator=generator).requires_grad_()
    lr, (beta1, beta2, beta3), alpha, warmup, eps, decay = 1e-2, (0.9, 0.98, 0.999), 4.0, 12, 1e-6, 0.1
    made = AdEMAMix([weights], lr, (beta1, beta2, beta3), alpha, warmup, eps, decay)
    theta, zeros = weights.detach().clone(), torch.zeros_like(weights)
    m1, m2, nu = zeros.clone(), zeros.clone(), zeros.clone()
    for t in range(1, 21):
        gradient = torch.randn(5, 7, dtype=torch.float64, generator=generator)
        share = min(t / warmup, 1.0)
        alpha_t = min(t * alpha / warmup, alpha)
        exponent = math.log(beta1) * math.log(beta3) / ((1 - share) * math.log(beta3) + share * math.log(beta1))
        beta3_t = min(math.exp(exponent), beta3)
        m1 = beta1 * m1 + (1 - beta1) * gradient
        m2 = beta3_t * m2 + (1 - beta3_t) * gradient
        nu = beta2 * nu + (1 - beta2) * gradient**2
        m1_hat, nu_hat = m1 / (1 - beta1**t), nu / (1 - beta2**t)
        theta = theta - lr * ((m1_hat + alpha_t * m2) / (nu_hat.sqrt() + eps) + decay * theta)
        weights.grad = gradient
        made.step()
        torch.testing.assert_close(weights.detach(), theta, rtol=1e-12, atol=1e-12)
    assert list(made.state[weights]) == ["exp_avg", "exp_avg_slow", "exp_avg_sq", "step"]


def test_without_the_slow_average_it_is_adamw() -> None:
    ours, torchs = (torch.linspace(-1, 1, 33).requires_grad_() for _ in range(2))
    made = AdEMAMix([ours], 1e-2, (0.9, 0.95, 0.99), alpha=0.0, weight_decay=0.1)
    known = torch.optim.AdamW([torchs], 1e-2, (0.9, 0.95), weight_decay=0.1)
    for step in range(20):
        ours.grad = torchs.grad = torch.linspace(1, -2, 33) * math.cos(step)
        made.step()
        known.step()
    torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-7)


def test_the_mixture_reaches_its_values() -> None:
    group = {"betas": (0.9, 0.98, 0.9999), "alpha": 8.0, "warmup": 100}
    assert mixture(100, group) == mixture(101, group) == (8.0, 0.9999)
    alpha, beta3 = mixture(50, group)
    assert alpha == 4.0
    half_lives = [math.log(0.5) / math.log(one) for one in (0.9, beta3, 0.9999)]
    assert abs(half_lives[1] - (half_lives[0] + half_lives[2]) / 2) < 1e-6 * half_lives[1]
    assert mixture(1, {**group, "warmup": 0}) == (8.0, 0.9999)
