"""Chooses the next token from the logits: greedy, or drawn from a distribution that temperature, top-k, top-p and min-p
narrow, in the order and with the meaning of transformers' logits processors.

Shape legend: B rows, V vocabulary.
"""

import hashlib
from dataclasses import dataclass

import torch

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.stack import stack


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when a text ends."""

    temperature: float = 0.0
    """Divisor of the logits before a token is drawn; 0 takes the most likely token, whatever the next three fields
    are."""
    top_k: int = 0
    """Number of most likely tokens to draw from; 0 for all."""
    top_p: float = 1.0
    """Probability that the most likely tokens to draw from have together (Holtzman et al. 2020, arXiv:1904.09751)."""
    min_p: float = 0.0
    """Share of the most likely token's probability that a token must have (Nguyen et al. 2024, arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Factor by which tokens of the prompt and of the text so far are made less likely (Keskar et al. 2019,
    arXiv:1909.05858)."""
    seed: int = 1234
    """Seed of the draws: a text depends on it and on the prompt's number alone, not on layout or batch."""
    max_new_tokens: int = 128
    """Most tokens to generate."""
    stop: tuple[str, ...] = ()
    """Strings before which a text ends."""
    ignore_eod: bool = False
    """Whether a text goes on after the end of a document."""

    def check(self) -> None:
        """Raise ConfigurationError, with every value that cannot be."""
        wrong = [
            text
            for is_wrong, text in (
                (self.temperature < 0, f"--temperature {self.temperature} is below 0; 0 takes the most likely token"),
                (self.top_k < 0, f"--top-k {self.top_k} is below 0; 0 draws from all tokens"),
                (not 0 < self.top_p <= 1, f"--top-p {self.top_p} is not above 0 and at most 1; 1 draws from all"),
                (not 0 <= self.min_p <= 1, f"--min-p {self.min_p} is not between 0 and 1; 0 draws from all tokens"),
                (
                    self.repetition_penalty <= 0,
                    f"--repetition-penalty {self.repetition_penalty} is not above 0; 1 changes nothing",
                ),
                (self.max_new_tokens < 1, f"--num-tokens-to-generate {self.max_new_tokens} is not positive; use 128"),
                ("" in self.stop, "--stop has an empty string, which every text begins with; leave it out"),
            )
            if is_wrong
        ]
        if wrong:
            raise ConfigurationError(wrong)


def check_drafts(config: Config, sampling: Sampling) -> None:
    """Raise ConfigurationError where no depth can draft, or nothing could judge the drafts."""
    problems, flag = [], "--speculative"
    if not config.model.mtp_num_layers:
        problems.append(
            f"{flag} drafts with the depths of multi-token prediction, and the model has none; leave {flag} out, or "
            "train a model with --mtp-num-layers"
        )
    elif config.model.mtp_hybrid_override_pattern is not None:
        problems.append(f"{flag} with depths of --mtp-hybrid-override-pattern, which draft nothing; leave {flag} out")
    if any(kind.mixer is not None and kind.mixer.keeps_a_state for kind, _ in stack(config).kinds):
        problems.append(f"{flag} with a recurrence, whose state cannot take drafts back; leave {flag} out")
    if sampling.temperature > 0 or sampling.repetition_penalty != 1.0:
        problems.append(f"{flag} takes the most likely tokens; use --temperature 0 and --repetition-penalty 1")
    if problems:
        raise ConfigurationError(problems)


class Sampler:
    """Chooses the next token of each row of a batch.

    Args:
        sampling: how.
        prompts: ids of each row's prompt.
        numbers: number of each row's prompt, which with the seed decides the row's draws.
        vocab_size: number of ids.
    """

    def __init__(self, sampling: Sampling, prompts: list[list[int]], numbers: list[int], vocab_size: int):
        self.sampling = sampling
        self._generators = [_generator(sampling.seed, number) for number in numbers]
        self._used_BV: torch.Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self._used_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for used, prompt in zip(self._used_BV, prompts, strict=True):
                used[torch.tensor(prompt, dtype=torch.int64)] = True

    def next(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the chosen ids, int64 [B], on the device of the logits."""
        if self.sampling.temperature == 0.0 and self._used_BV is None:
            return logits_BV.argmax(-1)
        scores_BV = logits_BV.float().cpu()
        if self._used_BV is not None:
            scores_BV = penalized(scores_BV, self._used_BV, self.sampling.repetition_penalty)
        if self.sampling.temperature == 0.0:
            chosen_B = scores_BV.argmax(-1)
        else:
            probabilities_BV = narrowed(scores_BV, self.sampling).softmax(-1)
            drawn = zip(probabilities_BV, self._generators, strict=True)
            chosen_B = torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in drawn])
        if self._used_BV is not None:
            self._used_BV[torch.arange(len(chosen_B)), chosen_B] = True
        return chosen_B.to(logits_BV.device)


def penalized(scores_BV: torch.Tensor, used_BV: torch.Tensor, penalty: float) -> torch.Tensor:
    """Return the scores; used tokens' scores are divided by the penalty where positive, else multiplied by it."""
    lowered_BV = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
    return torch.where(used_BV, lowered_BV, scores_BV)


def narrowed(scores_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the scores over the temperature, with -infinity for what top-k, top-p and min-p leave out."""
    scores_BV = scores_BV / sampling.temperature
    if sampling.top_k:
        least_B1 = scores_BV.topk(min(sampling.top_k, scores_BV.size(-1))).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)
    if sampling.top_p < 1.0:
        ascending_BV, order_BV = scores_BV.sort(descending=False)
        out_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        out_BV[:, -1] = False
        scores_BV = scores_BV.masked_fill(out_BV.scatter(1, order_BV, out_BV), -torch.inf)
    if sampling.min_p > 0.0:
        probabilities_BV = scores_BV.softmax(-1)
        least_B1 = sampling.min_p * probabilities_BV.amax(-1, keepdim=True)
        scores_BV = scores_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)
    return scores_BV


def _generator(seed: int, number: int) -> torch.Generator:
    digest = hashlib.sha256(f"sample:{seed}:{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
