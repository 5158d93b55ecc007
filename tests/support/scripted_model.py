"""A model that is a table, which needs no weights and no groups of ranks."""

from typing import Any

import torch

from megatron_ext.device.cpu import CpuDevice
from megatron_ext.plugins.tasks.inference_model import Model
from megatron_ext.tokenizer.simple import ByteTokenizer
from tests.support.small_models import small_config

EOD, WIDTH = 256, 264
LETTERS = [*b"abcde", EOD]
DRAWN = torch.Generator().manual_seed(5)
TABLE = torch.full((5, 16, WIDTH), -50.0)
TABLE[:, :, LETTERS] = torch.randn(5, 16, 6, generator=DRAWN)
TABLE[:, :, 257:] = 100.0  # padding of the vocabulary is no token


def logits_of(token: int, position: int) -> torch.Tensor:
    """Return what the model says of the token after this one."""
    return TABLE[token % 5, position % 16]


class Scripted(Model):
    """A model that is a table: what comes next depends on the last token and on its position."""

    def forward(self, tokens_BS: torch.Tensor, positions: torch.Tensor, inference: Any) -> torch.Tensor:
        rows, length = tokens_BS.shape
        places = positions.expand(rows, length)
        found = [
            torch.stack([logits_of(int(tokens_BS[row, s]), int(places[row, s])) for row in range(rows)])
            for s in range(length)
        ]
        return inference.read(torch.stack(found), lambda hidden: hidden)


class _One:
    """A process group of this process alone."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class _Groups:
    tp = pp = dp_cp = _One()


def scripted_model(tokenizer: Any = None, **model: Any) -> Scripted:
    """Return the model of one process, with these flags of a small one."""
    config = small_config({"position_embedding_type": "rope", "padded_vocab_size": WIDTH, **model}, vocab_size=257)
    groups: Any = _Groups()
    return Scripted(config, CpuDevice(), groups, None, [], tokenizer or ByteTokenizer())  # pyright: ignore
