"""Scores tokens: how likely the model finds the last tokens of a sequence, given those before.

Sequences of unequal lengths are sorted by length, cut into batches, and dealt to the replicas of the model in rounds.
In a round every replica has a batch of the same shape; where there are too few sequences, rows are filled up, and what
comes of those is thrown away. So every sequence counts once, whatever the layout.

Shape legend: B rows, S positions, N scored tokens of a batch, V vocabulary of this tensor-parallel rank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ext.model.loss import TokenLogits
from megatron_ext.parts.attention.cached import Project, WholeSequences
from megatron_ext.plugins.tasks.inference_model import Model
from megatron_ext.terminal import tracked

_LOGITS_AT_ONCE = 1 << 24
"""Logits that a rank computes at once: 64 MB in fp32."""


@dataclass(frozen=True)
class Scorable:
    """Token ids, the last `scored` of which are scored; before those there is at least one."""

    tokens: Sequence[int]
    scored: int


@dataclass(frozen=True)
class Score:
    """The likelihood that the model gives the scored tokens of a sequence."""

    log_likelihood: float
    """Sum of their log-probabilities in nats, each given all tokens before it."""
    greedy: bool
    """Whether each of them is the most likely one."""


@dataclass(frozen=True)
class _Batch:
    """Rows of one pass on one replica."""

    members: list[int]
    """Numbers of the sequences."""
    tokens_BS: torch.Tensor
    wanted_N: torch.Tensor
    """Numbers s x B + b of the positions whose next token is scored; filled up with 0 to the round's length."""
    targets_N: torch.Tensor
    owners_N: torch.Tensor
    """Number of the sequence that each scored token belongs to; -1 where it is filled up, or a repetition."""


class _Scored(WholeSequences):
    """Reads log-probabilities of targets and whether they are the most likely tokens, fp64 [N, 2], not logits."""

    def __init__(self, batch: _Batch, model: Model):
        super().__init__(batch.wanted_N)
        self._targets, self._model = batch.targets_N, model

    def read(self, hidden_SBH: torch.Tensor, project: Project) -> torch.Tensor:
        """Return both for every scored token, of as many at a time as bounded memory allows."""
        vocabulary = self._model.config.model.padded_vocab_size // self._model.groups.tp.size()
        step = max(1, _LOGITS_AT_ONCE // vocabulary)
        pieces = zip(self.hidden(hidden_SBH).split(step), self._targets.split(step), strict=True)
        return torch.cat([self._of(project(hidden_NH), targets) for hidden_NH, targets in pieces])

    def _of(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        group = self._model.groups.tp
        if group.size() == 1:
            logits_NV = logits_NV[:, : self._model.vocab_size]
            log_probability = logits_NV.float().log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
        else:
            log_probability = -TokenLogits(logits_NV[:, None], targets_N[None], group).cross_entropy()[0]
        return torch.stack((log_probability.double(), (self._best(logits_NV) == targets_N).double()), dim=1)

    def _best(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the most likely token, the first of several, int64 [N]."""
        group = self._model.groups.tp
        values_N, tokens_N = logits_NV.max(-1)
        if group.size() == 1:
            return tokens_N
        own = torch.stack((values_N.double(), (tokens_N + group.rank() * logits_NV.size(-1)).double()))
        everyones = [torch.empty_like(own) for _ in range(group.size())]
        torch.distributed.all_gather(everyones, own, group=group)
        values, tokens = torch.stack(everyones, dim=1)
        return tokens.gather(0, values.argmax(0, keepdim=True))[0].long()


def score(model: Model, sequences: Sequence[Scorable], rows: int) -> list[Score]:
    """Score every sequence. Collective over all ranks, each of which gives the same and gets all scores.

    Args:
        model: the model.
        sequences: what to score.
        rows: sequences in a batch of one replica.
    """
    if not sequences:
        return []
    results = torch.zeros(len(sequences), 2, dtype=torch.float64, device=model.device.torch_device)
    with model.at_work():
        device = model.device.torch_device
        for batch in _batches(sequences, rows, model.replica, model.replicas, device, shown=model.rank == 0):
            positions = torch.arange(batch.tokens_BS.size(1), device=model.device.torch_device)[None]
            read = model.forward(batch.tokens_BS, positions, _Scored(batch, model))
            if read is not None and model.groups.tp.rank() == 0:
                own = batch.owners_N >= 0
                read[:, 1] = 1.0 - read[:, 1]  # counts tokens that another one is likelier than
                results.index_add_(0, batch.owners_N[own], read[own])
    model.sum_over_ranks(results)
    return [Score(log_likelihood, misses == 0.0) for log_likelihood, misses in results.tolist()]


def _batches(
    sequences: Sequence[Scorable], rows: int, replica: int, replicas: int, device: torch.device, *, shown: bool = False
) -> Iterator[_Batch]:
    """Yield the batches of one replica, longest first; all replicas' batches of a round have one shape. Show progress
    if `shown`."""
    order = sorted(range(len(sequences)), key=lambda number: (-len(sequences[number].tokens), number))
    starts = range(0, len(order), rows * replicas)
    for start in tracked("scoring", starts) if shown else starts:
        inside = order[start : start + rows * replicas]
        per_replica = math.ceil(len(inside) / replicas)
        shares = [inside[i * per_replica : (i + 1) * per_replica] for i in range(replicas)]
        length = max(len(sequences[number].tokens) for number in inside) - 1
        scored = max(sum(sequences[number].scored for number in share) for share in shares)
        yield _batch(sequences, shares[replica], per_replica, length, scored, device)


def _batch(
    sequences: Sequence[Scorable], members: list[int], rows: int, length: int, scored: int, device: torch.device
) -> _Batch:
    tokens_BS = torch.zeros(rows, length, dtype=torch.int64)
    wanted, targets, owners = (torch.zeros(scored, dtype=torch.int64) for _ in range(3))
    owners.fill_(-1)
    filled = 0
    for row, number in enumerate(members):
        sequence = sequences[number]
        tokens = torch.tensor(sequence.tokens, dtype=torch.int64)
        first, last = len(tokens) - 1 - sequence.scored, len(tokens) - 1
        assert first >= 0, "what is scored has a token before it"
        tokens_BS[row, :last] = tokens[:-1]
        here = slice(filled, filled + sequence.scored)
        wanted[here] = torch.arange(first, last) * rows + row
        targets[here] = tokens[first + 1 :]
        owners[here] = number
        filled += sequence.scored
    return _Batch(members, *(tensor.to(device) for tensor in (tokens_BS, wanted, targets, owners)))
