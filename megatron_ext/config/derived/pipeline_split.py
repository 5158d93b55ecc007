"""Computes how many layers each pipeline stage and model chunk has: even, or as one of Megatron's four ways to be
uneven.

    --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2      the stages between share the rest
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split  each counts as a layer
    --pipeline-model-parallel-layout "Et*3|(tt|)*2tL"                               said chunk by chunk

Everything that asks where a layer is goes through `layer_counts` (by `ranks.chunk_layers`); megatron-core is handed its
result.
"""

import re
from itertools import accumulate

from megatron_ext.config.schema import Config, LayoutConfig
from megatron_ext.config.schema.layout_flags import SPLIT_SCHEDULES, V_SHAPED

_MOST_CHARACTERS = 100_000
_GROUP = re.compile(r"\(([^()]+)\)\*(\d{1,6})")
_LETTER = re.compile(r"([EtmL|])\*(\d{1,6})")


def is_v_shaped(layout: LayoutConfig) -> bool:
    """Return whether the chunks lie on the ranks like a V, so that rank 0 has the first one and the last."""
    return layout.table in V_SHAPED


def splits_backward(layout: LayoutConfig) -> bool:
    """Return whether the pipeline schedule computes weight gradients apart from input gradients."""
    return layout.pipeline_model_parallel_size > 1 and layout.table in SPLIT_SCHEDULES


def last_stage(layout: LayoutConfig) -> int:
    """Return the rank of the pipeline that has the last chunk, with the loss."""
    return 0 if is_v_shaped(layout) else layout.pipeline_model_parallel_size - 1


def stage_of_chunk(stage: int, chunk: int, stages: int, *, v_shaped: bool) -> int:
    """Return the rank that has the `stage`-th part of a pass through all ranks, the `chunk`-th such pass; and as well
    the part that this rank has. The second half of a V runs backwards."""
    return stages - 1 - stage if v_shaped and chunk else stage


def read_pipeline_layout(text: str) -> list[str]:
    """Return the chunks of a layout string, each as the letters of its contents: "Et*2|(tt|)*2L" -> [Ett, tt, tt, L].

    The grammar is Megatron's: E is the embedding, t a transformer layer, m a depth of multi-token prediction, L the
    loss with all that leads to it; `|` ends a chunk; `x*n` and `(...)*n` repeat; commas mean nothing. Chunks are in the
    order in which a microbatch passes them.

    Raises:
        ValueError: it is not of this grammar; the text says where.
    """
    unrolled = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _LETTER):
        while (match := pattern.search(unrolled)) is not None:
            if len(unrolled) + len(match[1]) * int(match[2]) > _MOST_CHARACTERS:
                raise ValueError(f"it has more than {_MOST_CHARACTERS} layers")
            unrolled = unrolled[: match.start()] + match[1] * int(match[2]) + unrolled[match.end() :]
    wrong = re.search(r"[^EtmL|]", unrolled)
    if wrong is not None:
        raise ValueError(f"{wrong[0]!r} is none of E, t, m, L, |, x*n and (...)*n")
    return unrolled.split("|")


def layer_counts(config: Config) -> list[list[int]]:
    """Return the layers of every chunk, `layer_counts(config)[stage][chunk]`, for a validated configuration."""
    layout = config.layout
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if layout.pipeline_model_parallel_layout is not None:
        counts = [chunk.count("t") for chunk in read_pipeline_layout(layout.pipeline_model_parallel_layout)]
        assert len(counts) == stages * chunks, "validated: as many chunks as stages x virtual stages"
        return [counts[stage::stages] for stage in range(stages)]
    per_chunk = [_evenly(layers, chunks) for layers in _layers_per_stage(config)]
    counts = [[layers] * chunks for layers in per_chunk]
    # The embedding is in the first chunk of all and the loss in the last, where each takes the place of a layer.
    counts[0][0] -= layout.account_for_embedding_in_pipeline_split
    counts[-1][-1] -= layout.account_for_loss_in_pipeline_split
    assert min(min(stage) for stage in counts) >= 0, "validated"
    return counts


def _layers_per_stage(config: Config) -> list[int]:
    """Return the layers of every stage, the embedding and the loss among them where they count."""
    layout = config.layout
    first, last = layout.decoder_first_pipeline_num_layers, layout.decoder_last_pipeline_num_layers
    layers = config.model.num_layers + counted_as_layers(layout) - (first or 0) - (last or 0)
    others = layout.pipeline_model_parallel_size - (first is not None) - (last is not None)
    between = [_evenly(layers, others)] * others if others > 0 else []
    assert others > 0 or layers == 0, "validated: every layer is on a stage"
    return [*([] if first is None else [first]), *between, *([] if last is None else [last])]


def counted_as_layers(layout: LayoutConfig) -> int:
    """Return how many of the embedding and the loss count as a layer in the split."""
    return layout.account_for_embedding_in_pipeline_split + layout.account_for_loss_in_pipeline_split


def _evenly(layers: int, parts: int) -> int:
    size, rest = divmod(layers, parts)
    assert rest == 0, "validated: the layers divide evenly"
    return size


def is_uneven(counts: list[list[int]]) -> bool:
    """Return whether two chunks differ in their number of layers."""
    return len({layers for stage in counts for layers in stage}) > 1


def core_layout(counts: list[list[int]], depths: int = 0) -> list[list[str]]:
    """Return the split in the form of megatron-core's PipelineParallelLayerLayout: the contents of each chunk, in
    order; the last chunk has the depths of multi-token prediction."""
    stages, chunks = len(counts), len(counts[0])
    rows = [["decoder"] * counts[stage][chunk] for chunk in range(chunks) for stage in range(stages)]
    rows[0] = ["embedding", *rows[0]]
    rows[-1] = [*rows[-1], *["mtp"] * depths, "loss"]
    return rows


def first_layers(counts: list[list[int]]) -> list[list[int]]:
    """Return the index in the whole model of the first layer of every chunk, `[stage][chunk]`."""
    stages, chunks = len(counts), len(counts[0])
    in_order = [counts[stage][chunk] for chunk in range(chunks) for stage in range(stages)]
    starts = [0, *accumulate(in_order)]
    return [[starts[chunk * stages + stage] for chunk in range(chunks)] for stage in range(stages)]
