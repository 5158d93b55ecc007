"""Multi-token prediction in plain torch, from the equations of DeepSeek-V3 (arXiv:2412.19437, section 2.2) alone.

It reads weights by their global names, and tokens, labels and mask of whole samples; nothing of the program computes
in it. T positions of one sample at a time; equation numbers are those of the paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What the weights do not say of a model with RMSNorm, rotary positions and SwiGLU."""

    layers: int
    depths: int
    heads: int
    groups: int
    factor: float
    """Weight of the mean of the losses of the depths."""
    vocabulary: int
    eod: int | None = None
    """The token that ends a document, where documents are kept apart."""


def losses(weights: Weights, shape: Shape, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor):
    """Return the loss to differentiate, that of the next token, and that of each depth: means over the batch. All of
    the batch's samples are [batch, T]."""
    sums = torch.zeros(1 + shape.depths, dtype=torch.float64)
    counts = torch.zeros(1 + shape.depths, dtype=torch.float64)
    for one in zip(tokens, labels, mask, strict=True):
        for depth, (nats, counted) in enumerate(_of_sample(weights, shape, *one)):
            sums[depth] = sums[depth] + (nats.double() * counted.double()).sum()
            counts[depth] += counted.sum()
    means = sums / counts
    return means[0] + shape.factor / max(shape.depths, 1) * means[1:].sum(), means


def _of_sample(weights: Weights, shape: Shape, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor):
    length = len(tokens)
    document, position, current, first = [], [], 0, 0
    for index in range(length):
        if shape.eod is not None and index and tokens[index - 1] == shape.eod:
            current, first = current + 1, index
        document.append(current)
        position.append(index - first)
    if shape.eod is not None and tokens[-1] == shape.eod:
        current += 1
    document.append(current)  # of the token after the sample, which is the last label
    sees = torch.tensor([[key <= query and document[key] == document[query] for key in range(length)]
                         for query in range(length)])  # fmt: skip
    where = torch.tensor(position, dtype=torch.float32)
    embedding = weights["embedding.word_embeddings.weight"]
    head = weights.get("output_layer.weight", embedding)[: shape.vocabulary]
    hidden = embedding[tokens]
    for layer in range(shape.layers):
        hidden = _layer(weights, f"decoder.layers.{layer}", shape, hidden, where, sees)
    hidden = _norm(weights, "decoder.final_layernorm", hidden)
    yield F.cross_entropy(hidden @ head.T, labels, reduction="none"), mask
    everything = [*tokens.tolist(), int(labels[-1])]
    for depth in range(1, shape.depths + 1):
        # The tokens t_(i + k), their targets t_(i + k + 1), and whether position i has one in its own document.
        ahead = torch.tensor([everything[i + depth] if i + depth < length else 0 for i in range(length)])
        counted = [i + depth < length and document[i + depth + 1] == document[i] for i in range(length)]
        target = torch.tensor([int(labels[i + depth]) if i + depth < length else 0 for i in range(length)])
        weight = torch.tensor([float(mask[i + depth]) if ok else 0.0 for i, ok in enumerate(counted)])
        prefix = f"mtp.layers.{depth - 1}"
        both = (_norm(weights, f"{prefix}.enorm", embedding[ahead]), _norm(weights, f"{prefix}.hnorm", hidden))
        hidden = torch.cat(both, dim=-1) @ weights[f"{prefix}.eh_proj.weight"].T  # equation 21
        hidden = _layer(weights, f"{prefix}.transformer_layer", shape, hidden, where, sees)  # equation 22
        hidden = _norm(weights, f"{prefix}.final_layernorm", hidden)
        yield F.cross_entropy(hidden @ head.T, target, reduction="none"), weight  # equations 23 and 24


def _norm(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[f"{name}.weight"]


def _layer(weights: Weights, name: str, shape: Shape, x: torch.Tensor, where: torch.Tensor, sees: torch.Tensor):
    normed = _norm(weights, f"{name}.input_layernorm", x)
    mixed = normed @ weights[f"{name}.self_attention.linear_qkv.weight"].T
    per_group = shape.heads // shape.groups
    of_groups = mixed.view(len(x), shape.groups, per_group + 2, -1)
    size = of_groups.size(-1)
    angles = where[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cosines, sines = angles.cos()[:, None, None], angles.sin()[:, None, None]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)

    queries, keys = turned(of_groups[:, :, :per_group]), turned(of_groups[:, :, per_group : per_group + 1])
    scores = torch.einsum("qghd,kgd->ghqk", queries, keys[:, :, 0]) / size**0.5
    chances = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    attended = torch.einsum("ghqk,kgd->qghd", chances, of_groups[:, :, per_group + 1]).flatten(1)
    x = x + attended @ weights[f"{name}.self_attention.linear_proj.weight"].T
    gate, up = (_norm(weights, f"{name}.pre_mlp_layernorm", x) @ weights[f"{name}.mlp.linear_fc1.weight"].T).chunk(
        2, -1
    )
    return x + (F.silu(gate) * up) @ weights[f"{name}.mlp.linear_fc2.weight"].T
