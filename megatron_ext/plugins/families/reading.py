"""Reads values of a `config.json`, checked one by one, with every problem noted by the name of its key.

Lists the keys of a `config.json` that have no bearing on what the model computes, by the reason.

Every other key must be understood by its family, or it is refused by name: a model that trains as
something slightly else is worse than none.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_ext.config.parse.options import MOST


class Reading:
    """Holds the content of a `config.json`, and the problems found in it.

    Each method returns a usable value even where it finds a problem, so that all problems are found at once.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        defaults: Mapping[str, Any],
        aliases: Mapping[str, str] = MappingProxyType({}),
        renamed: Mapping[str, str] = MappingProxyType({}),
    ):
        """Take a file's content, what stands for keys that it does not have, key -> another name of the key, and key
        that is asked for -> the only name that files have for it."""
        self.content = content
        self.defaults = defaults
        self.aliases = aliases
        self.renamed = renamed
        self.problems: list[str] = []
        self._understood: set[str] = set()
        self._unread: dict[str, str] = {}

    def changed(self, **content: Any) -> "Reading":
        """Return the same file with other content, which shares this one's lists of problems and understood keys."""
        other = Reading({**self.content, **content}, self.defaults, self.aliases, self.renamed)
        other.problems, other._understood, other._unread = self.problems, self._understood, self._unread
        return other

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or what stands for one that is missing or null. The key is understood from now
        on, under both of its names; where these say different things, that is a problem."""
        key = self.renamed.get(key, key)
        names = [key, *([self.aliases[key]] if key in self.aliases else [])]
        self._understood.update(names)
        given = {name: value for name in names if (value := self.content.get(name)) is not None}
        if len(given) == 2 and len(set(map(json.dumps, given.values()))) == 2:
            first, second = (f"{name} is {json.dumps(value)}" for name, value in given.items())
            self.problems.append(f"{first}, but {second}: two names of one key; keep one of them")
        if given:
            return next(iter(given.values()))
        value = self.content.get(key, self.defaults.get(key, default))
        return default if value is None else value

    @property
    def understood(self) -> frozenset[str]:
        """Keys that have been asked for, as files name them."""
        return frozenset(self._understood)

    def understand(self, *keys: str) -> None:
        """Note keys that need not be read: they say nothing next to others, or are refused with them."""
        self._understood.update(self.renamed.get(key, key) for key in keys)

    def refuse_the_rest(self, why: str, but: Collection[str] = ()) -> None:
        """Note a problem, which `why` explains, for each key that has a value and was not understood."""
        for key, value in self.content.items():
            if value is not None and key not in self._understood and key not in but:
                self.problems.append(f"{key} is {_short(value)}, {why}")

    def boolean(self, key: str, default: bool) -> bool:
        """Return the value of a key that must be true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self._cannot_read(key, f"{key} is {_short(value)}, and neither true nor false")
        return value is True

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return the value of a key that must be a positive integer, or one of at least 0."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST:
            return value
        words = f"and not {'a positive' if least else 'a natural'} integer"
        if type(value) is int and value > MOST:
            words = f"above {MOST}, the largest integer that is read"
        is_missing = value is None and self.renamed.get(key, key) not in self.content
        given = "missing" if is_missing else _short(value)
        self._cannot_read(key, f"{key} is {given}, {words}")
        return least

    def integers(self, key: str, most: int, default: Sequence[int] = ()) -> list[int]:
        """Return the value of a key that must be a list of integers from 0 to below `most`."""
        value = self.get(key, default)
        if isinstance(value, list | tuple | range) and all(type(one) is int and 0 <= one < most for one in value):
            return [*value]
        self._cannot_read(key, f"{key} is {_short(value)}, and not a list of integers from 0 to {most - 1}")
        return [*default]

    def section(self, key: str) -> dict[str, Any]:
        """Return the value of a key that must be an object, an empty one where it is missing."""
        value = self.get(key)
        if value is None or isinstance(value, dict):
            return value or {}
        self._cannot_read(key, f"{key} is {_short(value)}, and not an object")
        return {}

    def number(self, key: str, default: float) -> float:
        """Return the value of a key that must be a positive, finite number."""
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        self._cannot_read(key, f"{key} is {_short(value)}, and not a positive number")
        return 1.0

    def number_from_0(self, key: str, *, below: float = sys.float_info.max) -> float:
        """Return the value of a key that must be a number of at least 0, and below a bound."""
        value = self.get(key, 0.0)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below:
            return float(value)
        bound = "" if below == sys.float_info.max else f" and below {below:g}"
        self._cannot_read(key, f"{key} is {_short(value)}, and not a number of at least 0{bound}")
        return 0.0

    def number_or_none(self, key: str) -> float | None:
        """Return the value of a key that must be a positive, finite number, or null: None."""
        return None if self.get(key) is None else self.number(key, 1.0)

    def _cannot_read(self, key: str, problem: str) -> None:
        """Note that a key has no value that can be read."""
        self._unread[key] = problem
        self.problems.append(problem)

    @property
    def is_readable(self) -> bool:
        """Whether every value so far could be read, so that checks of several values together make sense."""
        return not self._unread

    def found(self) -> list[str]:
        """Return every problem once, by the names that the file has; without those that follow from a key whose value
        cannot be read, for which another one was taken."""
        problems = [
            problem
            for problem in dict.fromkeys(self.problems)
            if not any(_names(key, problem) and problem != own for key, own in self._unread.items())
        ]
        named = {key: other for key, other in self.aliases.items() if key not in self.content and other in self.content}
        for names in (self.renamed, named):
            for key, other in names.items():
                problems = [re.sub(rf"\b{key}\b", other, problem) for problem in problems]
        return problems

    def refuse_unless(self, key: str, wanted: Any, default: Any, why: str) -> None:
        """Note a problem, which `why` explains, unless the key has the value `wanted`."""
        value = self.get(key, default)
        if value != wanted:
            self.problems.append(f"{key} is {_short(value)}, {why}")


def _names(key: str, problem: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", problem) is not None


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:50]}..."


WITHOUT_BEARING: dict[str, tuple[str, ...]] = {
    "say where the files come from; code that they name is never run, and weights are checked by name and shape": (
        "_name_or_path",
        "architectures",
        "auto_map",
        "is_llama_config",
        "model_type",
        "name_or_path",
        "transformers.js_config",
        "transformers_version",
        "trust_remote_code",
        "unsloth_fixed",
        "unsloth_version",
    ),
    "each file of weights says its dtype, and flags that of the run": ("dtype", "torch_dtype", "use_bfloat16"),
    "weights are read, not drawn": (
        *(
            "initializer_range",
            "embedding_initializer_range",
            "init_std",
            "linear_a_log_min",
            "linear_a_log_max",
            "linear_dt_min",
            "linear_dt_max",
        ),
        "linear_dt_init_floor",
    ),
    "are about training (`training_numbers.py`), and change no logits": (
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "dropout",
        "emb_pdrop",
        "embd_pdrop",
        "embed_dropout",
        "embedding_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "resid_dropout",
        "resid_pdrop",
        "residual_dropout",
        "router_aux_loss_coef",
    ),
    "say how the same is computed, and what transformers returns next to it": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_router_logits",
        "pretraining_tp",
        "reorder_and_upcast_attn",
        "return_dict",
        "tie_last_hidden_states",
        "torchscript",
        "use_cache",
    ),
    "name tokens, which the tokenizer does": (
        *("bos_token_id", "eod_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
    ),
    "are of generation, whose settings megatron-ext generate takes as flags": (
        "cache_implementation",
        "do_sample",
        "max_length",
        "max_sequence_length",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    ),
    "are of heads for other tasks, which are not trained here": (
        "_num_labels",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
    ),
}


def refuse_others(reading: Reading, usual: Mapping[str, Any]) -> None:
    """Refuse what only some files have, and what our model has in one form alone: key -> its one value."""
    for key, value in usual.items():
        reading.refuse_unless(key, value, value, f"only {json.dumps(value)} is supported")
