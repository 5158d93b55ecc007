"""Layout maths: the place of each rank on the axes. These are pure functions of the configuration, in Megatron's rank
order.

World size = tensor (TP) x context (CP) x data (DP) x pipeline (PP) parallel size. Tensor-parallel ranks are
neighbours, so that the heaviest traffic stays inside a machine; pipeline stages are farthest apart:

    rank = tp + TP x (cp + CP x (dp + DP x pp))
    rank = tp + TP x (cp + CP x (pp + PP x dp))        with --use-tp-pp-dp-mapping
"""

from typing import Literal, NamedTuple

from megatron_ext.config.derived.pipeline_split import first_layers, is_v_shaped, layer_counts, stage_of_chunk
from megatron_ext.config.schema import Config, LayoutConfig

Axis = Literal["tp", "cp", "dp", "pp"]

AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")


class Coordinates(NamedTuple):
    """A rank's place on each axis of the layout."""

    tp: int
    cp: int
    dp: int
    pp: int


def axis_sizes(layout: LayoutConfig) -> Coordinates:
    """Return how many ranks each axis has."""
    return Coordinates(
        layout.tensor_model_parallel_size,
        layout.context_parallel_size,
        layout.data_parallel_size,
        layout.pipeline_model_parallel_size,
    )


def coordinates(layout: LayoutConfig, rank: int) -> Coordinates:
    """Return the place of a rank, 0 <= rank < world size."""
    assert 0 <= rank < layout.world_size, f"rank {rank} of {layout.world_size}"
    first, second, *last = axis_sizes(layout)
    return Coordinates(*_place(rank, (first, second), (last[0], last[1]), layout))


def _place(
    rank: int, inner: tuple[int, int], outer: tuple[int, int], layout: LayoutConfig
) -> tuple[int, int, int, int]:
    """Return the rank's index on each axis: two of neighbouring ranks, the data-parallel ranks, the stages."""
    rank, first = divmod(rank, inner[0])
    rank, second = divmod(rank, inner[1])
    if layout.use_tp_pp_dp_mapping:
        replica, stage = divmod(rank, outer[1])
    else:
        stage, replica = divmod(rank, outer[0])
    return first, second, replica, stage


def rank_of(layout: LayoutConfig, at: Coordinates) -> int:
    """Return the rank at a place: the inverse of `coordinates`."""
    sizes = axis_sizes(layout)
    outer = at.dp * sizes.pp + at.pp if layout.use_tp_pp_dp_mapping else at.pp * sizes.dp + at.dp
    return at.tp + sizes.tp * (at.cp + sizes.cp * outer)


def groups(layout: LayoutConfig, axis: Axis) -> list[list[int]]:
    """Return the ranks that differ only along one axis, group by group, each in the order of that axis."""
    members: dict[Coordinates, list[int]] = {}
    for rank in range(layout.world_size):
        position = coordinates(layout, rank)
        members.setdefault(position._replace(**{axis: 0}), []).append(rank)
    return list(members.values())


class ExpertCoordinates(NamedTuple):
    """A rank's place among those that share the routed experts."""

    etp: int
    ep: int
    edp: int
    pp: int


def expert_axis_sizes(layout: LayoutConfig) -> ExpertCoordinates:
    """Return the axes of the same ranks divided a second time: expert tensor (ETP) x expert (EP) x expert data x
    pipeline parallel size."""
    return ExpertCoordinates(
        layout.expert_tensor_size,
        layout.expert_model_parallel_size,
        layout.expert_data_parallel_size,
        layout.pipeline_model_parallel_size,
    )


def expert_coordinates(layout: LayoutConfig, rank: int) -> ExpertCoordinates:
    """Return the place of a rank: rank = etp + ETP x (ep + EP x (edp + EDP x pp)), or with --use-tp-pp-dp-mapping
    etp + ETP x (ep + EP x (pp + PP x edp))."""
    first, second, *last = expert_axis_sizes(layout)
    return ExpertCoordinates(*_place(rank, (first, second), (last[0], last[1]), layout))


def context_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return which of the 2 x `size` equal chunks of a sample a context-parallel rank holds: one from the head, one
    from the tail, in this order.

    Under the causal mask a chunk's cost grows with its number, and these two cost the same together on every rank
    (the order of Megatron-LM, and of Llama 3, arXiv:2407.21783, section 3.3.2).
    """
    return rank, 2 * size - 1 - rank


def chunk_layers(config: Config) -> list[list[range]]:
    """Return the global layer indices (from 0) by pipeline stage and model chunk: `chunk_layers(config)[pp][chunk]`.

    Without interleaving a stage has one chunk. With it, chunk v of stage p is the (v x PP + p)-th that a microbatch
    passes (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). A chunk may hold no layer, but the embedding or the
    loss alone. The last one has the depths of multi-token prediction after its layers. Where chunks lie like a V,
    the second one of a stage is that which the stage as far from the other end would have.
    """
    counts = layer_counts(config)
    found = [
        [range(start, start + layers) for start, layers in zip(starts, stage, strict=True)]
        for starts, stage in zip(first_layers(counts), counts, strict=True)
    ]
    last = found[-1][-1]
    found[-1][-1] = range(last.start, last.stop + config.model.layers_ahead)
    stages, v_shaped = len(found), is_v_shaped(config.layout)
    return [
        [found[stage_of_chunk(stage, chunk, stages, v_shaped=v_shaped)][chunk] for chunk in range(len(counts[0]))]
        for stage in range(stages)
    ]
