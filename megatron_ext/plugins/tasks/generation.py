"""Generates texts: one pass over the prompts, then one over each further token, with keys and values kept.

The last stage chooses the next tokens, and the other stages hear of them. Prompts are dealt to the replicas of the
model in rounds, as in `scoring`; a replica without a prompt of its own goes along with another's.

Shape legend: B rows, S positions, V vocabulary.

Writes a text as it is generated, a piece with each token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from megatron_ext.config.derived.pipeline_split import last_stage
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.attention.cached import KeyValueCache, TextsInARow
from megatron_ext.plugins.tasks.inference_model import Model
from megatron_ext.plugins.tasks.sampling import Sampler, Sampling
from megatron_ext.plugins.tasks.speculation import Speculation
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

OnToken = Callable[[int, list[int]], None]
"""Is told, after each token, the number of a prompt and the ids generated for it so far; on its replica's ranks."""


@dataclass(frozen=True)
class Generated:
    """The text generated for a prompt."""

    tokens: list[int]
    """Ids, with neither the prompt nor the end of the document."""
    text: str | None
    """Text of the tokens, up to the stop string; None without a tokenizer."""
    reason: str
    """Why it ended: "eod", "stop" or "length"."""
    drafted: int = 0
    """Number of tokens that depths of multi-token prediction drafted for it."""
    accepted: int = 0
    """Number of them that the model would have chosen itself."""


@dataclass
class _Row:
    """A prompt at work."""

    number: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    ended_at: int | None = None
    """Number of its tokens; those after it were made while other rows were not finished."""
    drafted: int = 0
    accepted: int = 0


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    rows: int = 16,
    cached: bool = True,
    speculative: bool = False,
    on_token: OnToken | None = None,
) -> list[Generated]:
    """Go on from every prompt. Collective over all ranks, each of which gives the same and gets all that was made.

    Args:
        model: the model.
        prompts: token ids, at least one each.
        sampling: how tokens are chosen, and when a text ends.
        rows: prompts that a replica has at work at once, which bounds the cache's memory.
        cached: whether keys and values are kept; without, each token costs a pass over the whole text.
        speculative: whether depths of multi-token prediction draft tokens, which `sampling.check_drafts` allows.
        on_token: told of every token.
    Raises:
        ConfigurationError: a prompt is empty, has an id that is none, or leaves no room for the tokens.
    """
    sampling.check()
    check_prompts(model, prompts, sampling)
    made: list[_Row] = []
    with model.at_work():
        for start in range(0, len(prompts), rows * model.replicas):
            numbers = range(start, min(start + rows * model.replicas, len(prompts)))
            share = -(-len(numbers) // model.replicas)
            batch = _Batch(model, [_dealt(prompts, numbers, share, i) for i in range(model.replicas)], sampling)
            if speculative:
                batch.speculate(on_token)
            else:
                batch.run(cached, on_token)
            made += [row for row in batch.rows if row.number >= 0]
    return [_finished(model, row, sampling) for row in _of_all_replicas(model, made)]


def _dealt(prompts: Sequence[Sequence[int]], numbers: range, share: int, replica: int) -> list[_Row]:
    """Return a replica's rows; those beyond its prompts go along with the first prompt."""
    own = numbers[replica * share : (replica + 1) * share]
    batch = [_Row(number, list(prompts[number])) for number in own]
    return [*batch, *(_Row(-1, list(prompts[numbers[0]])) for _ in range(share - len(batch)))]


class _Batch:
    """Rows that one replica goes on from together.

    Args:
        dealt: rows of every replica: the passes of all have one shape.
    """

    def __init__(self, model: Model, dealt: list[list[_Row]], sampling: Sampling):
        self.model, self.rows, self.sampling = model, dealt[model.replica], sampling
        lengths = [[len(row.prompt) for row in rows] for rows in dealt]
        self.longest, self.together = max(map(max, lengths)), max(map(sum, lengths))
        self.chosen = torch.empty(0, dtype=torch.int64)
        numbers = [max(row.number, 0) for row in self.rows]
        self.sampler = Sampler(sampling, [row.prompt for row in self.rows], numbers, model.vocab_size)

    def run(self, cached: bool, on_token: OnToken | None) -> None:
        passes = self._cached_passes() if cached else self._whole_passes()
        for count, logits in enumerate(passes, start=1):
            self._take(self._chosen(logits), on_token)
            if count == self.sampling.max_new_tokens or self._all_finished():
                return

    def speculate(self, on_token: OnToken | None) -> None:
        """Do the same as `run` with drafts; a row that has ended takes no more tokens."""
        of_rows = [row.prompt for row in self.rows]
        speculation = Speculation(self.model, of_rows, self.longest, self.sampling.max_new_tokens)
        while not self._all_finished():
            made = speculation.next([row.reason is None for row in self.rows])
            for row, tokens in zip(self.rows, made, strict=True):
                if row.reason is None and row.tokens:
                    row.drafted, row.accepted = row.drafted + speculation.depths, row.accepted + len(tokens) - 1
                for token in tokens:
                    if row.reason is None:
                        self._add(row, token, on_token)

    def _cached_passes(self) -> Iterator[torch.Tensor | None]:
        """Yield the logits [B, V] of the last stage (None on others) after the prompts and after each further token."""
        device, prompts = self.model.device.torch_device, [row.prompt for row in self.rows]
        tokens = torch.tensor([prompt + [0] * (self.longest - len(prompt)) for prompt in prompts], device=device)
        lengths = [len(prompt) for prompt in prompts]
        cache = KeyValueCache(self.longest + self.sampling.max_new_tokens, lengths, self.longest, device)
        yield self.model.forward(tokens, torch.arange(self.longest, device=device)[None], cache)
        while True:
            yield self.model.forward(self.chosen[:, None], cache.advance(), cache)

    def _whole_passes(self) -> Iterator[torch.Tensor | None]:
        """Yield the same from passes over all tokens so far, one text after another."""
        device = self.model.device.torch_device
        for made in range(self.sampling.max_new_tokens):
            texts = [row.prompt + row.tokens for row in self.rows]
            lengths = [len(text) for text in texts]
            filled = self.together + made * len(texts) - sum(lengths)
            tokens = torch.tensor([[*chain.from_iterable(texts), *[0] * filled]], device=device)
            places = [torch.arange(length, device=device) for length in lengths]
            positions = torch.cat([*places, torch.zeros(filled, dtype=torch.int64, device=device)])
            yield self.model.forward(tokens, positions[None], TextsInARow(lengths, filled, device))

    def _chosen(self, logits: torch.Tensor | None) -> list[int]:
        """Return the next id of each row, on all stages alike."""
        model, group = self.model, self.model.groups.pp
        if logits is None:
            chosen = torch.empty(len(self.rows), dtype=torch.int64, device=model.device.torch_device)
        else:
            chosen = self.sampler.next(model.whole_vocabulary(logits))
        if group.size() > 1:
            torch.distributed.broadcast(chosen, group=group, group_src=last_stage(model.config.layout))
        self.chosen = chosen
        return chosen.tolist()

    def _take(self, chosen: list[int], on_token: OnToken | None) -> None:
        """Add a token to every row; one that has ended goes along until all have."""
        for row, token in zip(self.rows, chosen, strict=True):
            self._add(row, token, on_token)

    def _add(self, row: _Row, token: int, on_token: OnToken | None) -> None:
        row.tokens.append(token)
        if row.reason is not None:
            return
        row.reason = self._reason(row)
        if row.reason is not None:
            row.ended_at = len(row.tokens) - (row.reason == "eod")
        if on_token is not None and row.number >= 0:
            on_token(row.number, row.tokens[: row.ended_at])

    def _reason(self, row: _Row) -> str | None:
        if row.tokens[-1] == self.model.eod and not self.sampling.ignore_eod:
            return "eod"
        if self.sampling.stop and _stop_in(self.model, row, self.sampling.stop):
            return "stop"
        return "length" if len(row.tokens) == self.sampling.max_new_tokens else None

    def _all_finished(self) -> bool:
        open_rows = sum(row.reason is None and row.number >= 0 for row in self.rows)
        if self.model.replicas == 1:
            return open_rows == 0
        count = torch.tensor([open_rows], device=self.model.device.torch_device)
        return self.model.sum_over_ranks(count).item() == 0


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that tokens add to a prompt's: a blank with which it begins is part of it.

    Tokenizers such as SentencePiece leave out the blank of a text's first word, so the prompt's last token is decoded
    with the others.
    """
    before, whole = tokenizer.decode(prompt[-1:]), tokenizer.decode([*prompt[-1:], *tokens])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(tokens)


def _stop_in(model: Model, row: _Row, stop: Sequence[str]) -> bool:
    """Return whether the last token has completed a stop string; a token is at least a byte, which bounds the look
    back."""
    assert model.tokenizer is not None
    begin = max(0, len(row.tokens) - max(len(one.encode()) for one in stop) - 8)
    before = row.tokens[:begin] if begin else row.prompt
    text = text_after(model.tokenizer, before, row.tokens[begin:])
    return any(one in text for one in stop)


def _finished(model: Model, row: _Row, sampling: Sampling) -> Generated:
    assert row.reason is not None
    text = None if model.tokenizer is None else text_after(model.tokenizer, row.prompt, row.tokens)
    if text is not None:
        text = text[: min([index for one in sampling.stop if (index := text.find(one)) >= 0], default=len(text))]
    return Generated(row.tokens, text, row.reason, row.drafted, row.accepted)


def _of_all_replicas(model: Model, made: list[_Row]) -> list[_Row]:
    """Return the rows of all replicas in the order of the prompts."""
    rows = [replace(row, tokens=row.tokens[: row.ended_at]) for row in made]
    if model.replicas > 1:
        everyones: list[list[_Row]] = [[]] * model.replicas
        torch.distributed.all_gather_object(everyones, rows, group=model.groups.dp_cp)
        rows = [row for rows in everyones for row in rows]
    return sorted(rows, key=lambda row: row.number)


def check_prompts(model: Model, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Raise ConfigurationError where a prompt is empty, has an id that is none, or leaves no room for the tokens."""
    problems = []
    for number, prompt in enumerate(prompts, start=1):
        needed = len(prompt) + sampling.max_new_tokens
        if not prompt:
            problems.append(f"prompt {number} is empty; give at least one token, or the end of a document as its text")
        elif wrong := [token for token in prompt if not 0 <= token < model.vocab_size]:
            problems.append(f"prompt {number} has the id {wrong[0]}; ids are 0 to {model.vocab_size - 1}")
        elif model.longest is not None and needed > model.longest:
            problems.append(
                f"prompt {number} has {len(prompt)} tokens, and --num-tokens-to-generate is {sampling.max_new_tokens}: "
                f"{needed} of the model's {model.longest} positions; at most "
                f"{max(0, model.longest - len(prompt))} can be generated"
            )
    if sampling.stop and model.tokenizer is None:
        problems.append("--stop needs the model's tokenizer; name it with --tokenizer-type and --tokenizer-model")
    if problems:
        raise ConfigurationError(problems[:5])


class Stream:
    """Writes the final part of a growing text: no half character, and nothing that may belong to a stop string.

    Args:
        tokenizer: decodes the ids.
        prompt: ids that the text goes on from.
        stop: strings before which the text ends.
        write: takes each piece.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], write: Callable[[str], object]
    ):
        self._tokenizer, self._prompt, self._stop, self._write = tokenizer, prompt, stop, write
        self._written = 0

    def __call__(self, number: int, tokens: list[int]) -> None:
        """Write the text that the last token has made final; an `OnToken` of `generation`."""
        text = text_after(self._tokenizer, self._prompt, tokens).rstrip("\ufffd")
        kept_back = max((_overlap(text, one) for one in self._stop), default=0)
        self._until(text[: len(text) - kept_back])

    def finish(self, text: str) -> None:
        """Write the rest of the whole text."""
        self._until(text)

    def _until(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text to hold back: from the first `stop` on where the text has one,
    else as many as the longest beginning of `stop` that the text ends with."""
    if stop in text:
        return len(text) - text.find(stop)
    return next((length for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length])), 0)
