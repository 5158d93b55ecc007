"""Evaluates a model on a task of local files: perplexity, LAMBADA, multiple choice.

What is scored, and after which tokens, is fixed here and written in docs/tasks.md: a plain loop over the same tokens
with another implementation of the model gives the same results.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from megatron_ext.config.eval_tasks import EvalTask
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.inference.files import read_documents, read_items, text_of
from megatron_ext.inference.model import Model
from megatron_ext.inference.scoring import Scorable, score
from megatron_ext.tokenizer.protocol import Tokenizer

Results = dict[str, float]
"""Names of metrics and their values; counts too."""


def evaluate_task(model: Model, task: EvalTask, rows: int) -> Results:
    """Return the metrics of a task. Collective over all ranks, each of which gets the same.

    Args:
        rows: sequences in a batch of one replica of the model.
    Raises:
        ConfigurationError: the model has no tokenizer.
        DataError, StorageError: a file cannot be read as one of this task.
    """
    if model.tokenizer is None:
        raise ConfigurationError(
            f"{task.kind} needs the model's tokenizer; name it with --tokenizer-type and --tokenizer-model"
        )
    return _EVALUATIONS[task.kind](model, task, rows)


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


def continuation(tokenizer: Tokenizer, context: str, text: str, length: int) -> Scorable:
    """Return `text` after `context`, as lm-evaluation-harness cuts their tokens: blanks at the context's end belong to
    the text, and its tokens are those that the context's own do not cover.

    Args:
        length: most tokens that the model is given at once: what is too long loses its beginning.
    """
    bare = context.rstrip()
    whole = tokenizer.encode(context + text)
    before = tokenizer.encode(bare) if bare else []
    scored = max(1, len(whole) - len(before))
    tokens = [tokenizer.eod, *whole] if not before or scored == len(whole) else whole
    return truncated(tokens, scored, length)


def truncated(tokens: list[int], scored: int, length: int) -> Scorable:
    """Return the end of the sequence, as long as the model may be given: `length` tokens and the last target."""
    tokens = tokens[-(length + 1) :]
    return Scorable(tokens, min(scored, len(tokens) - 1))


def length_of(model: Model) -> int:
    """Return the most tokens that the model is given at once: the sequence length that it was trained with."""
    length = model.config.model.seq_length
    return min(length, model.longest or length)


def _perplexity(model: Model, task: EvalTask, rows: int) -> Results:
    """Return nats, tokens, words and bytes of all documents, and perplexity per each."""
    assert model.tokenizer is not None
    texts = [text for path in task.valid_data for text in read_documents(path)]
    length = length_of(model)
    stride = min(task.overlapping_eval or length, length)
    sequences = [
        window
        for text in texts
        for window in windows(model.tokenizer.encode(text), model.tokenizer.eod, length, stride)
    ]
    nats = -math.fsum(one.log_likelihood for one in score(model, sequences, rows))
    tokens = sum(one.scored for one in sequences)
    words, size = sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
    if not tokens:
        raise DataError(f"{', '.join(task.valid_data)}: no token to predict; give a text that is not empty")
    return {
        "loss": nats / tokens,
        "perplexity": _exp(nats / tokens),
        "word_perplexity": _exp(nats / words) if words else math.nan,
        "byte_perplexity": _exp(nats / size),
        "bits_per_byte": nats / size / math.log(2),
        "tokens": tokens,
        "words": words,
        "bytes": size,
    }


def _lambada(model: Model, task: EvalTask, rows: int) -> Results:
    """Return how often the last word (or token) is what the model finds most likely."""
    assert model.tokenizer is not None
    cut = _last_word if task.strict_lambada else _last_token
    sequences = [
        cut(model.tokenizer, where, text_of(where, item, "text"), length_of(model))
        for path in task.valid_data
        for where, item in read_items(path, ["text"])
    ]
    if not sequences:
        raise DataError(f"{', '.join(task.valid_data)}: no line; give objects with a text")
    scores = score(model, sequences, rows)
    correct = sum(one.greedy for one in scores)
    mean = -math.fsum(one.log_likelihood for one in scores) / len(scores)
    return {
        "accuracy": correct / len(scores),
        "perplexity": _exp(mean),
        "correct": correct,
        "items": len(scores),
    }


def _last_token(tokenizer: Tokenizer, where: str, text: str, length: int) -> Scorable:
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise DataError(f"{where}: a text of {len(tokens)} tokens has no last one to predict from others")
    return truncated(tokens, 1, length)


def _last_word(tokenizer: Tokenizer, where: str, text: str, length: int) -> Scorable:
    """Cut as Megatron-LM does with --strict-lambada: what is before the word, and a blank with the word, are encoded
    apart."""
    words = text.split()
    if len(words) < 2:
        raise DataError(f"{where}: a text of {len(words)} words has no last one to predict from others")
    before = tokenizer.encode(text[: text.rfind(words[-1])].strip())
    word = tokenizer.encode(" " + words[-1])
    return truncated([*before, *word], len(word), length)


def _multiple_choice(model: Model, task: EvalTask, rows: int) -> Results:
    """Return how often the right choice is the likeliest: by its log-likelihood, and by that per character."""
    assert model.tokenizer is not None
    length, sequences, questions = length_of(model), [], []
    for path in task.valid_data:
        for where, item in read_items(path, ["prompt", "choices", "answer"]):
            prompt, choices = text_of(where, item, "prompt"), _choices(where, item)
            questions.append((choices, _answer(where, item, choices)))
            sequences += [continuation(model.tokenizer, prompt, choice, length) for choice in choices]
    if not questions:
        raise DataError(f"{', '.join(task.valid_data)}: no line; give objects with prompt, choices and answer")
    scores = iter(score(model, sequences, rows))
    plain = normalized = 0
    for choices, answer in questions:
        found = [next(scores).log_likelihood for _ in choices]
        plain += _best(found) == answer
        normalized += _best([value / len(choice) for value, choice in zip(found, choices, strict=True)]) == answer
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


_EVALUATIONS: dict[str, Callable[[Model, EvalTask, int], Results]] = {
    "PERPLEXITY": _perplexity,
    "LAMBADA": _lambada,
    "MULTIPLE_CHOICE": _multiple_choice,
}
