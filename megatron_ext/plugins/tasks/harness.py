"""Makes a model of ours one of lm-evaluation-harness (`lm_eval`, which is not among our requirements).

    results = evaluate(Leader(model), ["arc_easy"])      # on the first rank; the others follow

Tokens are cut as the harness's own adapter of transformers cuts them, so that a checkpoint and its export get the same
scores.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.leader import Leader
from megatron_ext.plugins.tasks.sampling import Sampling
from megatron_ext.plugins.tasks.tasks import continuation, plain_text, prefix_of, windows

_MOST_TOKENS = 256
"""Tokens to generate where a task does not say, as the harness's own adapters have it."""

_MOST_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(LM):
    """A model on the ranks of a layout, as the harness asks for one.

    Args:
        leader: of the ranks that hold it.
        rows: sequences in a batch of one replica.
    """

    def __init__(self, leader: Leader, rows: int):
        super().__init__()
        model = leader.model
        if model.tokenizer is None:
            raise ConfigurationError(
                "lm-evaluation-harness needs the model's tokenizer; name it with --tokenizer-type and --tokenizer-model"
            )
        self._leader, self._rows, self._tokenizer = leader, rows, model.tokenizer
        self._length = max(model.config.model.seq_length, model.config.model.max_position_embeddings)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-likelihood, and whether it is the most likely text, of each (context, text)."""
        pairs = [request.args for request in requests]
        scored = [
            continuation(self._tokenizer, context, text, self._length, f"request {number} ({text[:40]!r})")
            for number, (context, text) in enumerate(pairs, start=1)
        ]
        return [(one.log_likelihood, one.greedy) for one in self._leader.score(scored, self._rows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text."""
        prefix = prefix_of(self._tokenizer)
        cut = [
            list(windows(self._tokenizer.encode(request.args[0]), prefix, self._length, self._length))
            for request in requests
        ]
        scores = iter(self._leader.score([window for windows_ in cut for window in windows_], self._rows))
        return [math.fsum(next(scores).log_likelihood for _ in windows_) for windows_ in cut]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model generates after each context, up to one of the request's stop strings."""
        made: dict[int, str] = {}
        alike: dict[Sampling, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(_sampling(request.args[1]), []).append(number)
        for sampling, numbers in alike.items():
            prompts = [self._prompt(requests[number].args[0], sampling.max_new_tokens) for number in numbers]
            answers = self._leader.generate(prompts, sampling, self._rows)
            texts = [_up_to(plain_text(self._tokenizer, answer.tokens), sampling.stop) for answer in answers]
            made |= dict(zip(numbers, texts, strict=True))
        return [made[number] for number in range(len(requests))]

    def _prompt(self, context: str, new_tokens: int) -> list[int]:
        """Return the end of a context that leaves room for the tokens to generate."""
        if new_tokens >= self._length:
            raise ConfigurationError(
                f"max_gen_toks {new_tokens} leaves none of the model's {self._length} positions to a context; "
                "generate fewer"
            )
        tokens = self._tokenizer.encode(context) or [prefix_of(self._tokenizer)]
        return tokens[new_tokens - self._length :]


def _up_to(text: str, stop: Sequence[str]) -> str:
    return text[: min([index for one in stop if (index := text.find(one)) >= 0], default=len(text))]


def _sampling(wanted: dict[str, Any]) -> Sampling:
    """Translate a request's settings, under any of the names that the harness has for the most tokens."""
    until = wanted.get("until") or []
    temperature = float(wanted.get("temperature", 1.0)) if wanted.get("do_sample") else 0.0
    limits = [wanted[name] for name in _MOST_TOKENS_NAMES if wanted.get(name) is not None]
    return Sampling(
        temperature=temperature,
        top_k=int(wanted.get("top_k") or 0),
        top_p=float(wanted.get("top_p") or 1.0),
        max_new_tokens=int(limits[0]) if limits else _MOST_TOKENS,
        stop=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
    )


def evaluate(
    leader: Leader,
    tasks: Sequence[str],
    rows: int,
    include_path: str | None = None,
    shots: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Run tasks of the harness, and return its results by task.

    Args:
        leader: of the ranks that hold the model.
        tasks: names of the harness, or of the YAML files in `include_path`.
        rows: sequences in a batch of one replica.
        include_path: folder with tasks of one's own.
        shots: examples before each question; default each task's own number.
        limit: questions of each task; default all.
    """
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    run: Callable[..., Any] = lm_eval.simple_evaluate
    answer = run(
        model=HarnessModel(leader, rows),
        tasks=list(tasks),
        num_fewshot=shots,
        limit=limit,
        task_manager=TaskManager(include_path=include_path),
        log_samples=False,
        bootstrap_iters=0,
    )
    return {
        task: {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in answer["results"].items()
    }
