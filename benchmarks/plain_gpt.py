"""The model of `cpu_speed.py` is written here as one would write it plainly in torch: megatron_ext is measured against
it.

It uses nn.Linear, F.scaled_dot_product_attention, nn.RMSNorm, torch.optim.AdamW and clip_grad_norm_, and imports
nothing of megatron. Query, key and value are one product, and so are gate and up: the faster of the two usual ways.

Shapes: B batch, S sequence, H heads, D channels of a head.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Sizes:
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequence: int
    eps: float = 1e-5
    rotary_base: float = 10000.0


def rotate(x_BHSD: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = x_BHSD.chunk(2, dim=-1)
    return x_BHSD * cosines + torch.cat((-second, first), dim=-1) * sines


class Layer(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=sizes.eps)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.projection = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(sizes.hidden, eps=sizes.eps)
        self.gate_up = nn.Linear(sizes.hidden, 2 * sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(context.transpose(1, 2).reshape(batch, sequence, hidden))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainGPT(nn.Module):
    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=sizes.eps)
        channels = sizes.hidden // sizes.heads
        frequencies = sizes.rotary_base ** (-torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(sizes.sequence), frequencies).repeat(1, 2)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats per token. tokens, labels: int64 [B, S]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosines, self.sines)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def load_megatron_weights(model: PlainGPT, weights: dict[str, torch.Tensor], sizes: Sizes) -> None:
    """Take over megatron_ext's weights, by global name.

    Its linear_qkv holds the rows of one head after another, each head's query, key and value together; its
    linear_fc1 holds gate, then up; its vocabulary has rows of padding at the end.
    """
    heads, hidden = sizes.heads, sizes.hidden
    state = {
        "embedding.weight": weights["embedding.word_embeddings.weight"][: sizes.vocab],
        "norm.weight": weights["decoder.final_layernorm.weight"],
    }
    for index in range(sizes.layers):
        theirs = f"decoder.layers.{index}"
        qkv = weights[f"{theirs}.self_attention.linear_qkv.weight"].view(heads, 3, hidden // heads, hidden)
        state |= {
            f"layers.{index}.attention_norm.weight": weights[f"{theirs}.input_layernorm.weight"],
            f"layers.{index}.qkv.weight": qkv.transpose(0, 1).reshape(3 * hidden, hidden),
            f"layers.{index}.projection.weight": weights[f"{theirs}.self_attention.linear_proj.weight"],
            f"layers.{index}.mlp_norm.weight": weights[f"{theirs}.pre_mlp_layernorm.weight"],
            f"layers.{index}.gate_up.weight": weights[f"{theirs}.mlp.linear_fc1.weight"],
            f"layers.{index}.down.weight": weights[f"{theirs}.mlp.linear_fc2.weight"],
        }
    model.load_state_dict(state)


@dataclass(frozen=True)
class Recipe:
    steps: int
    warmup: int
    peak: float
    lowest: float
    beta2: float
    weight_decay: float
    clip: float

    def learning_rate(self, step: int) -> float:
        """Return the rate of a linear warmup, then a cosine; `step` counts from 0."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.lowest + 0.5 * (1.0 + math.cos(math.pi * done)) * (self.peak - self.lowest)


def make_optimizer(model: nn.Module, recipe: Recipe, fused: bool | None) -> torch.optim.AdamW:
    """Return AdamW without weight decay on norms. `fused=None` is torch's default: on a CPU a loop over the tensors."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak, betas=(0.9, recipe.beta2), eps=1e-8, fused=fused)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    step: int,
    tokens: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """Take one step on one batch; return its loss."""
    for group in optimizer.param_groups:
        group["lr"] = recipe.learning_rate(step)
    loss = model(tokens, labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()
