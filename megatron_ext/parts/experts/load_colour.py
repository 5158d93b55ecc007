"""The colour by which pictures show the load of an expert."""

import math


def load_colour(ratio: float) -> tuple[int, int, int]:
    """Return the colour, red, green and blue up to 255, of a load that is `ratio` times an even one: white is even,
    orange 8 times and more, blue an eighth and less, black none."""
    if ratio <= 0:
        return 0, 0, 0
    share = max(-1.0, min(1.0, math.log2(ratio) / 3))
    ends = (0xBD, 0x4F, 0x0A) if share > 0 else (0x1F, 0x66, 0xB5)
    red, green, blue = (round(255 + abs(share) * (end - 255)) for end in ends)
    return red, green, blue
