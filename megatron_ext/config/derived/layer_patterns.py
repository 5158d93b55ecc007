"""Reads flags that say which layers have something: a number, or a pattern over the layers, as Megatron writes them; or
a letter for each layer."""

import ast
import functools
from typing import Literal

FIELDS = ("window_size", "window_attn_skip_freq", "no_rope_freq", "moe_layer_freq", "linear_attention_freq")
"""Fields of the model that are read here. One value may be written in several ways."""

ATTENTION, MLP, EXPERTS = "*", "-", "E"
"""Letters of --hybrid-layer-pattern, each for a layer that is attention, an MLP or experts alone; plugins bring more
letters with their mixers (`parts/kinds.py`)."""

PIPE = "|"
"""Character of --hybrid-layer-pattern at which a chunk of the pipeline ends."""

DEPTH = "/"
"""Character of --hybrid-layer-pattern before the letters of each depth of multi-token prediction."""

_LONGEST, _MOST_LAYERS = 1000, 100_000  # characters of a pattern, and layers in it


def read_window(text: str) -> int | None:
    """Return how many latest positions a query sees with `--window-size LEFT,RIGHT`, its own included: LEFT + 1, or
    None where LEFT is -1, without a limit.

    RIGHT is how many later positions it sees; in a causal model 0.

    Raises:
        ValueError: the text is not such a pair.
    """
    left, right = (int(number) for number in text.strip().strip("()").split(","))
    if left < -1 or right != 0:
        raise ValueError(text)
    return None if left == -1 else left + 1


Counted = Literal["all but the last", "the last", "the first"]


@functools.lru_cache(64)
def read_pattern(text: str, layers: int, counted: Counted = "all but the last") -> tuple[bool, ...]:
    """Return in which of the layers a pattern has a 1.

    A number N stands for N layers in turn, of which those that are `counted` have it; a list, `[1,1,0]*4` or
    `([1]*3+[0])*2`, for itself.

    Raises:
        ValueError: it is neither, or has another number of layers.
    """
    try:
        value = _value(ast.parse(text.strip()[: _LONGEST + 1], mode="eval").body) if len(text) <= _LONGEST else None
    except (SyntaxError, RecursionError, MemoryError):
        value = None
    if isinstance(value, int) and value > 0:
        places = (number % value for number in range(layers))
        if counted == "the first":
            return tuple(place == 0 for place in places)
        return tuple((place == value - 1) == (counted == "the last") for place in places)
    if isinstance(value, list) and len(value) == layers and set(value) <= {0, 1}:
        return tuple(bool(one) for one in value)
    raise ValueError(text)


def is_dealt(
    pattern: str | None, layers: int, number: int, counted: Counted = "all but the last", *, otherwise: bool = False
) -> bool:
    """Return whether a pattern has a 1 in layer `number`; `otherwise`, where there is none or it cannot be read."""
    try:
        return otherwise if pattern is None else read_pattern(pattern, layers, counted)[number]
    except ValueError:
        return otherwise


def _value(node: ast.AST) -> int | list[int] | None:
    """Return the value of a number, of a list of numbers, of a sum of lists or of a list times a number; None for
    anything else."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=elements):
            values = [_value(element) for element in elements]
            return (
                [one for one in values if isinstance(one, int)] if all(isinstance(one, int) for one in values) else None
            )
        case ast.BinOp(left=left, op=operation, right=right):
            first, second = _value(left), _value(right)
            if isinstance(operation, ast.Mult) and isinstance(first, int):
                first, second = second, first
            if isinstance(operation, ast.Mult) and isinstance(first, list) and isinstance(second, int):
                return first * second if len(first) * second <= _MOST_LAYERS else None
            if isinstance(operation, ast.Add) and isinstance(first, list) and isinstance(second, list):
                return first + second
    return None
