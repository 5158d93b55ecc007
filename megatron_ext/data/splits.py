"""Training, validation and test: which files each reads, and which share of their documents."""

from dataclasses import dataclass

from megatron_ext.config.parse.blend import Blend, read_blend
from megatron_ext.config.schema import Config

SPLITS = ("train", "valid", "test")  # megatron-core's order


@dataclass(frozen=True)
class SplitFiles:
    """Says where one split comes from: files, and the share of their sequences."""

    split: str
    flag: str
    blend: Blend
    split_weights: str  # as --split
    bounds: tuple[float, float]  # begin and end of the split's sequences, as fractions of all


def split_files(config: Config, split: str) -> SplitFiles | None:
    """Return the files of a split, as the flags name them; None where it has none, or no share of them."""
    data = config.data
    words = getattr(data, f"{split}_data_path")
    if data.data_path:
        flag, blend, split_weights = "--data-path", read_blend(data.data_path), data.split
    elif words:
        flag, blend = f"--{split}-data-path", read_blend(words)
        split_weights = ",".join("1" if name == split else "0" for name in SPLITS)
        if len(blend.prefixes) == 1:
            blend = Blend(blend.prefixes)  # as in megatron-core, where a lone weight would change the number of epochs
    else:
        return None
    bounds = split_bounds(split_weights)[SPLITS.index(split)]
    return None if bounds is None else SplitFiles(split, flag, blend, split_weights, bounds)


def split_bounds(split: str) -> list[tuple[float, float] | None]:
    """Return begin and end of training, validation and test, as fractions of all sequences; None for one without a
    share.

    The arithmetic is megatron-core's to the last bit, so that both sample orders divide the same documents alike.
    """
    weights = [float(weight) for weight in split.split(",")]
    shares = [weight / sum(weights) for weight in weights] + [0.0] * (len(SPLITS) - len(weights))
    bounds, begin = [], 0.0
    for share in shares:
        bounds.append((begin, begin + share) if share > 0 else None)
        begin += share
    return bounds
