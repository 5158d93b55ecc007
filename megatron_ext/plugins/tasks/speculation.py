"""Several tokens of a text in one pass: depths of multi-token prediction draft them, and the model judges the drafts
(Leviathan et al. 2023, arXiv:2211.17192; DeepSeek-V3, arXiv:2412.19437, section 5.4.3).

A pass takes the latest token of each row and the drafts after it. The model's own choice after each of them says which
drafts it would have written itself: these are kept, and the first other choice after them. Keys and values of the rest
are taken back. Greedy tokens are the same as with one pass for each token, but where two logits are closer than
rounding.

Shape legend: B rows, S positions of a pass, K depths, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron_ext.config.derived.pipeline_split import last_stage
from megatron_ext.model.names import unwrapped
from megatron_ext.parts.attention.cached import KeyValueCache, Project
from megatron_ext.plugins.tasks.inference_model import Model


class _Trunk(KeyValueCache):
    """Keeps the hidden states of a pass as well, of which depths make further ones."""

    hidden_SBH: torch.Tensor

    def begin(self, last_layer: int | None) -> None:
        """Begin the pass through a model chunk, whose last layer goes on with all positions."""
        super().begin(None)

    def read(self, hidden_SBH: torch.Tensor, project: Project) -> torch.Tensor:
        """Return the logits at the positions of `wanted`, [N, V]."""
        self.hidden_SBH = hidden_SBH
        return super().read(hidden_SBH, project)


class Speculation:
    """Goes on from prompts by as many tokens in a pass as the model agrees with.

    Args:
        model: the model, which `sampling.check_drafts` allows.
        prompts: ids of each row.
        width: tokens that the rows of all replicas are filled up to in the first pass.
        most: the most tokens that a row is asked for.
    """

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], width: int, most: int):
        self._model, device = model, model.device.torch_device
        self.depths = model.config.model.mtp_num_layers or 0
        """Number of tokens that are drafted in each pass."""
        lengths = [len(prompt) for prompt in prompts]
        cached = width + most + 2 * (self.depths + 1), lengths, width, device
        self._trunk = _Trunk(*cached)
        self._ahead = [KeyValueCache(*cached) for _ in range(self.depths if model.is_last_stage else 0)]
        self._tokens_BS = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        self._positions = torch.arange(width, device=device)[None]
        self._last_B = torch.tensor(lengths, device=device) - 1
        self._is_first = True
        self._wrong: list[int] = []

    def next(self, goes_on: Sequence[bool]) -> list[list[int]]:
        """Make a pass, and return the tokens that each row gets: the drafts that were right, and one more. Collective
        over all ranks.

        Args:
            goes_on: whether each row kept the tokens of the last pass; a finished row is computed along, and its tokens
                mean nothing.
        """
        if not self._is_first:
            for cache in (self._trunk, *self._ahead):
                if self._wrong:
                    cache.take_back(
                        [n if goes else self.depths + 1 for n, goes in zip(self._wrong, goes_on, strict=True)]
                    )
                self._positions = cache.advance(self.depths + 1)
            self._tokens_BS = self._next_BS
        logits = self._model.forward(self._tokens_BS, self._positions, self._trunk)
        said, group = self._said(logits), self._model.groups.pp
        if group.size() > 1:
            torch.distributed.broadcast(said, group=group, group_src=last_stage(self._model.config.layout))
        chosen_SB, drafts_KB = said.tensor_split((-self.depths,))
        _, right_B, latest_B = self._judged(chosen_SB)
        right = right_B.tolist()
        self._wrong = [] if self._is_first else [self.depths - count for count in right]
        self._is_first, self._next_BS = False, torch.stack((latest_B, *drafts_KB), dim=1)
        return [row[: count + 1] for row, count in zip(chosen_SB.T.tolist(), right, strict=True)]

    def _said(self, logits: torch.Tensor | None) -> torch.Tensor:
        """Return the choices of the last stage after each token, or after the prompts, and then the drafts, int64
        [S or 1 + K, B]; on other stages room for them."""
        rows, judged = len(self._tokens_BS), 1 if self._is_first else self.depths + 1
        if logits is None:
            return self._tokens_BS.new_empty(judged + self.depths, rows)
        chosen_SB = self._model.whole_vocabulary(logits).argmax(-1).view(judged, rows)
        last_B, _, latest_B = self._judged(chosen_SB)
        return torch.stack((*chosen_SB, *self._drafted(last_B, latest_B)))

    def _judged(self, chosen_SB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return of each row the index of its last token in this pass that stays, how many drafts were right, and the
        choice after them."""
        agrees_SB = chosen_SB[:-1] == self._tokens_BS.T[1 : len(chosen_SB)]
        right_B = agrees_SB.long().cumprod(0).sum(0)
        return self._last_B if self._is_first else right_B, right_B, chosen_SB.gather(0, right_B[None])[0]

    def _drafted(self, last_B: torch.Tensor, latest_B: torch.Tensor) -> list[torch.Tensor]:
        """Return the choice of each depth, [B]: depth k reads its states of the position `last_B` and the k tokens
        after it."""
        model, (rows, length) = self._model, self._tokens_BS.shape
        chunk, every = unwrapped(model.chunks)[-1], torch.arange(rows, device=last_B.device)
        known_BS, hidden, drafts = F.pad(self._tokens_BS, (0, self.depths)), self._trunk.hidden_SBH, []
        for depth, cache in enumerate(self._ahead):
            known_BS[every, last_B + 1 + depth] = latest_B
            cache.wanted = last_B * rows + every
            tokens = known_BS[:, depth + 1 : depth + 1 + length]
            hidden, logits = chunk.ahead(depth, hidden, tokens, self._positions, cache)
            latest_B = model.whole_vocabulary(logits).argmax(-1)
            drafts.append(latest_B)
        return drafts
