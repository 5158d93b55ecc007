"""Reads flags that say which layers have something: a number, or a pattern over the layers, as Megatron writes them."""

import ast

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


def read_pattern(text: str, layers: int) -> tuple[bool, ...]:
    """Return in which of the layers a pattern has a 1.

    A number N stands for N - 1 layers with it and one without, in turn; a list, `[1,1,0]*4` or `([1]*3+[0])*2`, for
    itself.

    Raises:
        ValueError: it is neither, or has another number of layers.
    """
    try:
        value = _value(ast.parse(text.strip()[: _LONGEST + 1], mode="eval").body) if len(text) <= _LONGEST else None
    except (SyntaxError, RecursionError, MemoryError):
        value = None
    if isinstance(value, int) and value > 0:
        return tuple((number + 1) % value != 0 for number in range(layers))
    if isinstance(value, list) and len(value) == layers and set(value) <= {0, 1}:
        return tuple(bool(one) for one in value)
    raise ValueError(text)


def _value(node: ast.AST) -> int | list[int] | None:
    """Return a number, a list of numbers, lists one after another, or a list so many times; None for anything else."""
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
