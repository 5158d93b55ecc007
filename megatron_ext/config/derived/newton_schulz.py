"""Coefficients of Muon's Newton-Schulz iteration, and scales of its updates, as Megatron-LM's flags name them.

An iteration takes a matrix X, whose norm is at most 1, to a X + (b X X^T + c (X X^T)^2) X: its singular values go to
about 1, its singular vectors stay. Coefficients and scales are as in the package emerging-optimizers 0.3.
"""

from itertools import chain, cycle, islice, repeat

Coefficients = tuple[float, float, float]

_SIMPLE: Coefficients = (3.4445, -4.7750, 2.0315)
# fmt: off
_CYCLED: dict[str, tuple[Coefficients, ...]] = {
    "simple": (_SIMPLE,),  # https://kellerjordan.github.io/posts/muon/
    "quintic": (  # https://leloykun.github.io/ponder/muon-opt-coeffs/
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "aol": (  # https://github.com/thib-s/flash-newton-schulz
        (4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169),
    ),
}
_CONVERGING: dict[str, tuple[Coefficients, ...]] = {
    "polar_express": (  # arXiv:2505.16932, divided by 1.01 to the power of each term as in its Algorithm 1
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750),
    ),
    "cans": (  # arXiv:2506.10935
        (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "deepseekv4": (*[_SIMPLE] * 8, *[(2.0, -1.5, 0.5)] * 2),  # the report of DeepSeek-V4
}
# fmt: on

COEFFICIENT_TYPES = (*_CYCLED, *_CONVERGING)
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")


def coefficients(kind: str, steps: int) -> list[Coefficients]:
    """Return the coefficients of each of `steps` iterations: a short list begins anew, or its last ones stay."""
    if kind in _CYCLED:
        return list(islice(cycle(_CYCLED[kind]), steps))
    return list(islice(chain(_CONVERGING[kind], repeat(_CONVERGING[kind][-1])), steps))


def made_for(kind: str) -> int:
    """Return the number of iterations that the list of coefficients is made for."""
    return len((_CYCLED | _CONVERGING)[kind])


def mismatch(kind: str, steps: int) -> str | None:
    """Return how a list of coefficients made for another number of iterations is used; None where the list fits.

    The list of `polar_express` always fits: its coefficients are the best for their iteration, however many follow.
    """
    whole = made_for(kind)
    if kind == "polar_express" or (steps % whole == 0 if kind in _CYCLED else steps == whole):
        return None
    if steps < whole:
        used = coefficients(kind, steps)
        alike = next((f", to the bit {one}" for one in _CYCLED if one != kind and coefficients(one, steps) == used), "")
        return f"made for {whole} iterations, of which these are the first {steps}{alike}"
    return f"made for {whole} iterations, and later ones {'begin it anew' if kind in _CYCLED else 'repeat its last'}"


def scale(mode: str, rows: int, columns: int) -> float:
    """Return the factor for an update with singular values of 1.

    With `spectral` the elements of updates have the same size in every matrix, like Adam's (arXiv:2502.16982, section
    2.2); with `unit_rms_norm` the outputs of updates have (arXiv:2502.07529); `shape_scaling` is Muon's first formula.
    """
    if mode == "spectral":
        return max(rows, columns) ** 0.5
    ratio = rows / columns
    return (ratio if mode == "unit_rms_norm" else max(1.0, ratio)) ** 0.5
