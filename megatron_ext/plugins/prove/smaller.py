"""Makes a draw that differs from one process smaller, for as long as it differs: pieces of the model and of the layouts
are left out, layers, ranks and the change of layout, and in the end single flags."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron_ext.plugins.prove.draws import ONE_PROCESS, Draw, Layout, words


def smaller(draw: Draw, differs: Callable[[Draw], bool], *, tries: int = 60) -> Draw:
    """Return the smallest draw that was found.

    Args:
        draw: what differs.
        differs: whether a smaller draw can work, and differs in the same way.
        tries: most draws that are asked for.
    """
    for split in (False, True):
        draw = _by_flags(draw) if split else draw
        found = True
        while found:
            found = False
            for one in _candidates(draw):
                if tries == 0:
                    return draw
                tries -= 1
                if differs(one):
                    draw, found = one, True
                    break
    return draw


def _candidates(draw: Draw) -> Iterator[Draw]:
    """Yield draws that are smaller by one step, those first that leave out most."""
    killed = draw.kill is not None
    if not killed and draw.second != ONE_PROCESS:
        yield replace(draw, second=ONE_PROCESS)
        if draw.second != draw.first:
            yield replace(draw, second=draw.first)
    if not killed and draw.first != ONE_PROCESS:
        yield replace(draw, first=ONE_PROCESS)
    for half in (draw.model[1 + len(draw.model) // 2 :], draw.model[1 : 1 + len(draw.model) // 2]):
        if len(half) > 1:
            yield replace(draw, model=tuple(piece for piece in draw.model if piece not in half))
    for number, piece in enumerate(draw.model):
        shorter = piece.replace("--num-layers 8", "--num-layers 4").replace("--num-layers 4", "--num-layers 2")
        if shorter != piece:
            yield replace(draw, model=(*draw.model[:number], shorter, *draw.model[number + 1 :]))
        else:
            yield replace(draw, model=draw.model[:number] + draw.model[number + 1 :])
    for one in _smaller_layouts(draw.first):
        yield replace(draw, first=one, second=one if draw.second == draw.first else draw.second)
    if draw.second != draw.first:
        for one in _smaller_layouts(draw.second):
            yield replace(draw, second=one)


def _smaller_layouts(layout: Layout) -> Iterator[Layout]:
    if layout.ranks % 2 == 0:
        yield replace(layout, ranks=layout.ranks // 2)
    for number in range(len(layout.pieces)):
        yield replace(layout, pieces=layout.pieces[:number] + layout.pieces[number + 1 :])


def _by_flags(draw: Draw) -> Draw:
    """Return the draw with a piece for each flag."""

    def split(pieces: tuple[str, ...]) -> tuple[str, ...]:
        flags: list[list[str]] = []
        for word in words(pieces):
            if word.startswith("--"):
                flags.append([word])
            else:
                flags[-1].append(word)
        return tuple(shlex.join(flag) for flag in flags)

    first, second = (replace(layout, pieces=split(layout.pieces)) for layout in (draw.first, draw.second))
    return replace(draw, model=split(draw.model), first=first, second=second)
