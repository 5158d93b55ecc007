"""Evaluates a model on a task of local files: perplexity, LAMBADA, multiple choice.

What is scored, and after which tokens, is fixed here and written in docs/tasks.md: a plain loop over the same tokens
with another implementation of the model gives the same results.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.tasks.eval_tasks import EvalTask
from megatron_ext.plugins.tasks.inference_model import Model
from megatron_ext.plugins.tasks.scoring import Scorable, Score, score
from megatron_ext.plugins.tasks.task_files import read_documents, read_items, text_of
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

Results = dict[str, float]
"""Names of metrics and their values; counts too."""


@dataclass(frozen=True)
class PreparedTask:
    """A task whose files are read and cut into sequences to score."""

    sequences: Sequence[Scorable]
    results: Callable[[Sequence[Score]], Results]
    """Makes the metrics of the scores of all sequences."""


def prepare_task(model: Model, task: EvalTask) -> PreparedTask:
    """Read the files of a task. No pass of the model is made.

    Raises:
        ConfigurationError: the model has no tokenizer.
        DataError, StorageError: a file cannot be read as one of this task.
    """
    if model.tokenizer is None:
        raise ConfigurationError(
            f"{task.kind} needs the model's tokenizer; name it with --tokenizer-type and --tokenizer-model"
        )
    return _PREPARED[task.kind](model.tokenizer, task, length_of(model))


def evaluate_prepared(model: Model, task: PreparedTask, rows: int) -> Results:
    """Return the metrics of a task. Collective over all ranks, each of which gets the same.

    Args:
        model: the model.
        task: the same on all ranks.
        rows: sequences in a batch of one replica of the model.
    """
    return task.results(score(model, task.sequences, rows))


def evaluate_task(model: Model, task: EvalTask, rows: int) -> Results:
    """Return the metrics of a task, as `evaluate_prepared`. Raises as `prepare_task`."""
    return evaluate_prepared(model, prepare_task(model, task), rows)


def windows(tokens: Sequence[int], prefix: int, length: int, stride: int) -> Iterator[Scorable]:
    """Cut a text into sequences in which each of its tokens is scored once.

    The first window scores `length` tokens after `prefix`; each further one the next `stride` tokens, after as many
    tokens before them as it has room for (Megatron-LM's --overlapping-eval; with stride = length the last, shorter one
    alone overlaps).

    Args:
        prefix: id that stands before the first token.
        length: most tokens that the model is given at once.
    """
    whole = [prefix, *tokens]
    done = 0
    while done < len(tokens):
        until = min(done + (stride if done else length), len(tokens))
        yield Scorable(whole[max(0, until - length) : until + 1], until - done)
        done = until


def prefix_of(tokenizer: Tokenizer) -> int:
    """Return the id that stands before a text without context, as lm-evaluation-harness has it: the token that begins a
    text where the tokenizer's folder names one, else the one that ends a document."""
    begin = getattr(tokenizer, "bos", None)
    return tokenizer.eod if begin is None else begin


def unframed(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a piece of text, without the special tokens that the tokenizer puts before and after whole
    texts (such as <s>)."""
    return tokenizer.encode_rendered(text)[0] if isinstance(tokenizer, LibraryTokenizer) else tokenizer.encode(text)


def plain_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of ids without special tokens, as servers and lm-evaluation-harness show it."""
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.decode_plain(tokens)
    special = set(getattr(tokenizer, "special_tokens", {}).values())
    return tokenizer.decode([token for token in tokens if token not in special])


def continuation(tokenizer: Tokenizer, context: str, text: str, length: int, where: str) -> Scorable:
    """Return `text` after `context`, as lm-evaluation-harness cuts their tokens: blanks at the context's end belong to
    the text, and its tokens are those that the context's own do not cover.

    Args:
        length: most tokens that the model is given at once: a context that is too long loses its beginning.
        where: what names the text in messages.
    Raises:
        DataError: no token of the text is left, or more than the model is given at once.
    """
    bare = context.rstrip()
    if not bare:
        tokens, prefix = unframed(tokenizer, context + text), prefix_of(tokenizer)
        if tokens[:1] == [prefix]:
            return truncated(tokens, len(tokens) - 1, length, where)
        return truncated([prefix, *tokens], len(tokens), length, where)
    whole = tokenizer.encode(context + text)
    return truncated(whole, len(whole) - len(tokenizer.encode(bare)), length, where)


def truncated(tokens: list[int], scored: int, length: int, where: str) -> Scorable:
    """Return the end of the sequence, as long as the model may be given: `length` tokens and the last target.

    Raises:
        DataError: no token is scored, or more than `length` tokens are.
    """
    if scored < 1:
        raise DataError(f"{where} has no token of its own to score; give it a text")
    if scored > length:
        raise DataError(
            f"{where} has {scored} tokens to score, and the model is given {length} at once; shorten it, or raise "
            "--seq-length if the model's positions allow it"
        )
    return Scorable(tokens[-(length + 1) :], scored)


def length_of(model: Model) -> int:
    """Return the most tokens that the model is given at once: the sequence length that it was trained with."""
    length = model.config.model.seq_length
    return min(length, model.longest or length)


def _perplexity(tokenizer: Tokenizer, task: EvalTask, length: int) -> PreparedTask:
    """Score all tokens of all documents: nats, tokens, words and bytes, and perplexity per each."""
    texts = [text for path in task.valid_data for text in read_documents(path)]
    stride = min(task.overlapping_eval or length, length)
    sequences = [window for text in texts for window in windows(tokenizer.encode(text), tokenizer.eod, length, stride)]
    tokens = sum(one.scored for one in sequences)
    words, size = sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
    if not tokens:
        raise DataError(f"{', '.join(task.valid_data)}: no token to predict; give a text that is not empty")

    def results(scores: Sequence[Score]) -> Results:
        nats = -math.fsum(one.log_likelihood for one in scores)
        return {
            "loss": nats / tokens,
            "perplexity": _exp(nats / tokens),
            "word_perplexity": _exp(nats / words) if words else math.nan,
            "byte_perplexity": _exp(nats / size) if size else math.nan,
            "bits_per_byte": nats / size / math.log(2) if size else math.nan,
            "tokens": tokens,
            "words": words,
            "bytes": size,
        }

    return PreparedTask(sequences, results)


def _lambada(tokenizer: Tokenizer, task: EvalTask, length: int) -> PreparedTask:
    """Score the last word (or token): how often the model finds it the most likely."""
    cut = _last_word if task.strict_lambada else _last_token
    sequences = [
        cut(tokenizer, where, text_of(where, item, "text"), length)
        for path in task.valid_data
        for where, item in read_items(path, ["text"])
    ]
    if not sequences:
        raise DataError(f"{', '.join(task.valid_data)}: no line; give objects with a text")

    def results(scores: Sequence[Score]) -> Results:
        correct = sum(one.greedy for one in scores)
        return {
            "accuracy": correct / len(scores),
            "perplexity": _exp(-math.fsum(one.log_likelihood for one in scores) / len(scores)),
            "correct": correct,
            "items": len(scores),
        }

    return PreparedTask(sequences, results)


def _last_token(tokenizer: Tokenizer, where: str, text: str, length: int) -> Scorable:
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise DataError(f"{where}: a text of {len(tokens)} tokens has no last one to predict from others")
    return truncated(tokens, 1, length, where)


def _last_word(tokenizer: Tokenizer, where: str, text: str, length: int) -> Scorable:
    """Cut as Megatron-LM does with --strict-lambada: the text before the word, and a blank with the word, are encoded
    apart."""
    words = text.split()
    if len(words) < 2:
        raise DataError(f"{where}: a text of {len(words)} words has no last one to predict from others")
    before = tokenizer.encode(text[: text.rfind(words[-1])].strip())
    word = unframed(tokenizer, " " + words[-1])
    return truncated([*before, *word], len(word), length, f"{where}: the last word")


def _multiple_choice(tokenizer: Tokenizer, task: EvalTask, length: int) -> PreparedTask:
    """Score all choices: how often the right one is the likeliest, by its log-likelihood, and by that per character."""
    sequences: list[Scorable] = []
    questions: list[tuple[list[str], int]] = []
    for path in task.valid_data:
        for where, item in read_items(path, ["prompt", "choices", "answer"]):
            prompt, choices = text_of(where, item, "prompt"), _choices(where, item)
            questions.append((choices, _answer(where, item, choices)))
            sequences += [
                continuation(tokenizer, prompt, choice, length, f"{where}: choice {number}")
                for number, choice in enumerate(choices)
            ]
    if not questions:
        raise DataError(f"{', '.join(task.valid_data)}: no line; give objects with prompt, choices and answer")
    return PreparedTask(sequences, lambda scores: _choice_results(questions, scores))


def _choice_results(questions: Sequence[tuple[list[str], int]], scores: Sequence[Score]) -> Results:
    left = iter(scores)
    plain = normalized = 0
    for choices, answer in questions:
        logps = [next(left).log_likelihood for _ in choices]
        plain += _best(logps) == answer
        normalized += _best([value / len(choice) for value, choice in zip(logps, choices, strict=True)]) == answer
    return {
        "accuracy": plain / len(questions),
        "accuracy_normalized": normalized / len(questions),
        "correct": plain,
        "correct_normalized": normalized,
        "items": len(questions),
    }


def _choices(where: str, item: dict) -> list[str]:
    choices = item["choices"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise DataError(f"{where}: choices is no list of at least two texts")
    return choices


def _answer(where: str, item: dict, choices: list[str]) -> int:
    """Return the number of the right choice, which the file gives, or the text of it."""
    answer = item["answer"]
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    raise DataError(f"{where}: answer is {answer!r}; give the number of a choice, from 0, or its text")


def _best(values: list[float]) -> int:
    return values.index(max(values))


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


_PREPARED: dict[str, Callable[[Tokenizer, EvalTask, int], PreparedTask]] = {
    "PERPLEXITY": _perplexity,
    "LAMBADA": _lambada,
    "MULTIPLE_CHOICE": _multiple_choice,
}
