"""Rules about pipeline stages: which layers they have, and how microbatches pass them."""

import re
from collections.abc import Iterator, Sequence

from megatron_ext.config.derived.pipeline_split import counted_as_layers, read_pipeline_layout, splits_backward
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config, LayoutConfig
from megatron_ext.rules.reads import all_read_the_layout, reads
from megatron_ext.rules.suggest import divisors, listed, nearest_multiples, pipeline_sizes

_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_EMBEDDING, _LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
_LAYOUT = "--pipeline-model-parallel-layout"
_CHUNKS, _CHUNK_SIZE = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_SCHEDULE = "--pipeline-schedule"
_MANY = 1 << 16
_CHUNKS_OF = {"1f1b": (1, 1), "gpipe": (1, 1), "interleaved-1f1b": (2, _MANY), "zbv": (2, 2), "dualpipe-v": (2, 2)}
"""The least and the most model chunks of a rank, by schedule."""


def layers_are_split_in_one_way(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse two ways to split the layers over stages at once."""
    layout = config.layout
    ends, counted = _given_ends(layout), _counted(layout)
    if layout.pipeline_model_parallel_layout is not None:
        others = [*ends, *counted]
        if layout.num_layers_per_virtual_pipeline_stage is not None:
            others.append(f"{_CHUNK_SIZE} {layout.num_layers_per_virtual_pipeline_stage}")
        if others:
            yield f"{_LAYOUT} says where every layer is, but {' and '.join(others)} too; give the layout alone"
    elif ends and counted:
        yield f"{' and '.join(ends)} and {' and '.join(counted)} both shape the end stages; give one or the other"
    elif ends and layout.num_layers_per_virtual_pipeline_stage is not None:
        yield (
            f"{' and '.join(ends)}: the stages differ, so that {_CHUNK_SIZE} "
            f"{layout.num_layers_per_virtual_pipeline_stage} cannot say how many chunks they have; use {_CHUNKS} 2 "
            f"instead of {_CHUNK_SIZE}, or leave {_CHUNK_SIZE} out"
        )


def layout_string_is_right(config: Config, facts: Facts) -> Iterator[str]:
    """Require a layout string that can be read and holds the whole model."""
    layout, layers = config.layout, config.model.num_layers
    text, stages = layout.pipeline_model_parallel_layout, layout.pipeline_model_parallel_size
    if text is None or not positive(layers, stages):
        return
    depths = config.model.mtp_num_layers or 0
    working = f"{_LAYOUT} '{_even_layout(layers, stages, depths)}'" if layers >= stages else f"--num-layers {stages}"
    try:
        chunks = read_pipeline_layout(text)
    except ValueError as error:
        yield f"{_LAYOUT} '{text}': {error}; use for example {working}"
        return
    letters = "".join(chunks)
    if letters.count("E") != 1 or letters.count("L") != 1 or letters[0] != "E" or letters[-1] != "L":
        yield f"{_LAYOUT} '{text}' must begin with its only E and end with its only L; use for example {working}"
    elif letters.count("t") != layers:
        yield (
            f"{_LAYOUT} '{text}' has {letters.count('t')} layers t, but --num-layers is {layers}; use for example "
            f"{working}"
        )
    elif letters.count("m") != depths or (depths and not re.fullmatch("E?t*m+L", chunks[-1])):
        wanted = f"must have one m for each of --mtp-num-layers {depths}, before L in its last chunk"
        yield f"{_LAYOUT} '{text}' {wanted}; use for example {working}"
    elif "" in chunks:
        which = f"chunk {chunks.index('') + 1} of {len(chunks)}"
        yield f"{_LAYOUT} '{text}': {which} holds nothing; use for example {working}"
    elif len(chunks) % stages:
        sizes = pipeline_sizes(config)
        fix = f"use --pipeline-model-parallel-size {listed(sizes)}, or {working}" if sizes else f"use {working}"
        yield (
            f"{_LAYOUT} '{text}' has {len(chunks)} chunks, which --pipeline-model-parallel-size {stages} does not "
            f"divide; {fix}"
        )
    elif len(chunks) != stages * layout.virtual_pipeline_model_parallel_size:
        yield (
            f"{_LAYOUT} '{text}' has {len(chunks)} chunks, {len(chunks) // stages} on each of the {stages} stages, but "
            f"{_CHUNKS} is {layout.virtual_pipeline_model_parallel_size}; leave {_CHUNKS} out"
        )


def layers_divide_over_stages(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the layers divide over the pipeline stages."""
    layout, layers = config.layout, config.model.num_layers
    stages = layout.pipeline_model_parallel_size
    if layout.pipeline_model_parallel_layout is not None or _given_ends(layout) or not positive(layers, stages):
        return
    counted = _counted(layout)
    if (layers + len(counted)) % stages == 0:
        return
    what = f"--num-layers {layers}" + "".join(f" + 1 ({flag})" for flag in counted)
    unit = stages * max(layout.virtual_pipeline_model_parallel_size, 1)
    needed = [multiple - len(counted) for multiple in nearest_multiples(layers + len(counted), unit)]
    fixes = [f"use --num-layers {listed(n for n in needed if n > 0)}"]
    sizes = pipeline_sizes(config)
    if sizes:
        fixes.append(f"--pipeline-model-parallel-size {listed(sizes)}")
    uneven = _uneven_splits(layers, stages, layout.virtual_pipeline_model_parallel_size)
    if uneven and not counted:
        fixes.append("stages that differ: " + listed(uneven))
    yield f"{what} is not divisible by --pipeline-model-parallel-size {stages}; {', or '.join(fixes)}"


def end_stages_leave_the_rest_even(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the layers outside of the end stages divide over the stages between."""
    layout, layers = config.layout, config.model.num_layers
    stages, end_flags = layout.pipeline_model_parallel_size, _given_ends(layout)
    first, last = layout.decoder_first_pipeline_num_layers or 0, layout.decoder_last_pipeline_num_layers or 0
    if not end_flags or _counted(layout) or layout.pipeline_model_parallel_layout is not None:
        return
    if not positive(layers, stages) or min(first, last) < 0:
        return
    flags, between, rest = " and ".join(end_flags), stages - len(end_flags), layers - first - last
    if stages == 1:
        yield f"{flags} shapes pipeline stages, but --pipeline-model-parallel-size is 1; leave it out"
    elif between == 0 and rest != 0:
        fix = f"use {_LAST} {layers - first}" if first < layers else f"use {_FIRST} 1 {_LAST} {layers - 1}"
        yield f"{flags} together are all {stages} stages, but --num-layers is {layers}, not {first + last}; {fix}"
    elif between > 0 and (rest <= 0 or rest % between):
        chunks = layout.virtual_pipeline_model_parallel_size
        fixes = _uneven_splits(layers, stages, chunks, [flag.split()[0] for flag in end_flags])
        fix = f"use {listed(fixes)}" if fixes else f"use --num-layers {first + last + between}"
        yield (
            f"{flags} leave {rest} of --num-layers {layers} for the other {between} of --pipeline-model-parallel-size "
            f"{stages} stages, which cannot share them evenly; {fix}"
        )


def layers_divide_over_chunks(config: Config, facts: Facts) -> Iterator[str]:
    """Require that a stage's layers divide over its model chunks."""
    layout, layers = config.layout, config.model.num_layers
    chunks = layout.num_virtual_stages_per_pipeline_rank or 0
    chunk_size = layout.num_layers_per_virtual_pipeline_stage or 0
    if layout.pipeline_model_parallel_layout is not None or not positive(layers, layout.pipeline_model_parallel_size):
        return
    per_stage = _per_stage(config)
    if any(count % 1 or count < 1 for count in per_stage):
        return  # other rules name that
    sizes = sorted({int(count) for count in per_stage})
    if positive(chunks) and any(size % chunks for size in sizes):
        yield _does_not_divide(config, sizes, _CHUNKS, chunks)
    elif _given_ends(layout):
        return
    elif positive(chunk_size) and sizes[0] % chunk_size:
        yield _does_not_divide(config, sizes, _CHUNK_SIZE, chunk_size)
    elif positive(chunks, chunk_size) and chunks * chunk_size != sizes[0]:
        yield (
            f"{_CHUNKS} {chunks} and {_CHUNK_SIZE} {chunk_size} "
            f"disagree: a stage has {sizes[0]} layers; give one of them"
        )


def _does_not_divide(config: Config, sizes: list[int], flag: str, number: int) -> str:
    working = listed(n for n in divisors(sizes[0]) if all(size % n == 0 for size in sizes))
    of_a_stage = f"the {listed(sizes)} layers of a stage ({_arithmetic(config)})"
    return f"{flag} {number} does not divide {of_a_stage}; use {flag} {working}"


@reads("micro batch")
def interleaving_needs_stages(config: Config, facts: Facts) -> Iterator[str]:
    """Require at least two pipeline stages for interleaving."""
    layout = config.layout
    stages = layout.pipeline_model_parallel_size
    if layout.virtual_pipeline_model_parallel_size == 1 or stages < 1:
        return
    flag = f"{_CHUNKS} {layout.virtual_pipeline_model_parallel_size}"
    if layout.num_layers_per_virtual_pipeline_stage is not None:
        flag += f" ({_CHUNK_SIZE} {layout.num_layers_per_virtual_pipeline_stage})"
    if layout.pipeline_model_parallel_layout is not None:
        flag = f"{_LAYOUT} with {layout.virtual_pipeline_model_parallel_size} chunks per stage"
    if stages == 1:
        yield (
            f"{flag} interleaves pipeline stages, but --pipeline-model-parallel-size is 1; "
            f"leave the virtual stages out{_interleaved_layout(config)}"
        )
    elif stages == 2 and layout.no_overlap_p2p_communication and layout.table is None:
        yield (
            f"{flag} with --pipeline-model-parallel-size 2 cannot run under --no-overlap-p2p-communication: the two "
            f"ranks would exchange several tensors in one batch; leave --no-overlap-p2p-communication out"
        )


def _interleaved_layout(config: Config) -> str:
    """Return a pipeline size that interleaves with the virtual stages given, and a batch in whole rounds for it."""
    layout, training = config.layout, config.training
    sizes = [size for size in pipeline_sizes(config) if size > 1]
    if not sizes or not positive(training.micro_batch_size, layout.model_parallel_size, layout.world_size):
        return ""
    stages = sizes[0]
    ranks = layout.model_parallel_size // layout.pipeline_model_parallel_size * stages
    per_round = training.micro_batch_size * stages * (layout.world_size // ranks)
    rounds = -(-(training.global_batch_size or 1) // per_round)
    return f", or use --pipeline-model-parallel-size {stages} --global-batch-size {rounds * per_round}"


@reads("micro batch")
def microbatches_pass_in_whole_groups(config: Config, facts: Facts) -> Iterator[str]:
    """Require, as megatron-core does, groups of N microbatches, PP <= N <= all of them, and a last group of none or at
    least PP."""
    layout, training = config.layout, config.training
    stages, count = layout.pipeline_model_parallel_size, layout.microbatch_group_size_per_virtual_pipeline_stage
    if layout.table is not None:
        return
    if layout.virtual_pipeline_model_parallel_size == 1 or stages < 2:
        if count is not None:
            yield f"{_GROUP} {count} belongs to interleaved stages; add {_CHUNKS} 2, or leave it out"
        return
    if count is not None and count < stages:
        yield (
            f"{_GROUP} {count} is below --pipeline-model-parallel-size {stages}, so that stages would wait for each "
            f"other; use {_GROUP} {stages} or more"
        )
        return
    batch, micro = training.global_batch_size, training.micro_batch_size
    world, model_size = layout.world_size, layout.model_parallel_size
    if not positive(batch, micro, world, model_size) or world % model_size:
        return
    data_size, group = layout.data_parallel_size, layout.microbatch_group_size
    if batch % (micro * data_size):
        return  # another rule names that
    microbatches = batch // (micro * data_size)
    if group <= microbatches and (microbatches % group == 0 or microbatches % group >= stages):
        return
    needs = f"a number of microbatches that --pipeline-model-parallel-size {stages} divides"
    if count is not None:
        needs = f"whole groups of {_GROUP} {count} microbatches (the last may have {stages} or more)"
    yield (
        f"interleaving needs {needs}, but "
        f"--global-batch-size {batch} / (--micro-batch-size {micro} x data-parallel size {data_size}) = "
        f"{microbatches}; use --global-batch-size {listed(nearest_multiples(batch, group * micro * data_size))}"
    )


@reads("micro batch")
def schedule_suits_the_layout(config: Config, facts: Facts) -> Iterator[str]:
    """Require the model chunks and microbatches that a schedule is made for."""
    layout, name = config.layout, config.layout.pipeline_schedule
    stages, chunks = layout.pipeline_model_parallel_size, layout.num_virtual_stages_per_pipeline_rank or 1
    if name is None or stages < 2 or chunks < 1:
        return
    flag = f"{_SCHEDULE} {name}"
    least, most = _CHUNKS_OF.get(name, (1, chunks))
    if not least <= chunks <= most:
        named = "interleaved-1f1b" if chunks > 1 else "1f1b"
        fix = f"{_CHUNKS} {least}" if least > 1 else f"{_SCHEDULE} {'looped-bfs' if name == 'gpipe' else named}"
        of = f"exactly {least}" if least == most else f"at least {least}"
        yield f"{flag} needs {of} model chunks on each rank, and there are {chunks}; use {fix}"
        return
    if layout.table is None:
        return
    if (count := layout.microbatch_group_size_per_virtual_pipeline_stage) is not None:
        yield f"{_GROUP} {count} belongs to interleaved-1f1b, and {flag} has an order of its own; leave {_GROUP} out"
    training, splits = config.training, splits_backward(layout)
    growing = [
        each for each in ("rampup_batch_size", "step_batch_size_schedule") if getattr(training, each) is not None
    ]
    if growing and name != "zbv" and splits:
        other = "--" + growing[0].replace("_", "-")
        yield f"{flag} is for one number of microbatches, and {other} changes it; leave {other} out"
        return
    batch, micro = training.global_batch_size, training.micro_batch_size
    if not positive(batch, micro, layout.world_size, layout.model_parallel_size) or layout.data_parallel_size < 1:
        return
    each = micro * layout.data_parallel_size
    microbatches = batch // each
    if batch % each:
        return  # another rule names that
    has = f"--global-batch-size {batch} has {microbatches}; use --global-batch-size"
    if name == "dualpipe-v" and microbatches < 2 * stages:
        yield f"{flag} needs {2 * stages} microbatches or more, and {has} {2 * stages * each}"
    elif name == "interleaved-zero-bubble" and microbatches % max(1, microbatches // stages):
        rounds = f"microbatches that its {microbatches // stages} rounds of {stages} stages divide"
        yield f"{flag} needs {rounds}, and {has} {listed(nearest_multiples(batch, stages * each))}"
    if splits and training.torch_compile:
        yield (
            f"--torch-compile makes one kernel of a layer's backward pass, and {flag} splits it; leave --torch-compile "
            "out, or the schedule for the default"
        )


def split_is_right(config: Config, facts: Facts) -> bool:
    """Return whether `layer_counts` has an answer."""
    sizes = (config.model.num_layers, config.layout.pipeline_model_parallel_size)
    chunks = config.layout.num_virtual_stages_per_pipeline_rank
    if not positive(*sizes) or (chunks is not None and chunks < 1):
        return False
    return not any(problem for rule in _OF_THE_SPLIT for problem in rule(config, facts))


def _given_ends(layout: LayoutConfig) -> list[str]:
    """Return the flags of the end stages that are given, with their values."""
    first, last = layout.decoder_first_pipeline_num_layers, layout.decoder_last_pipeline_num_layers
    return [f"{flag} {value}" for flag, value in ((_FIRST, first), (_LAST, last)) if value is not None]


def _counted(layout: LayoutConfig) -> list[str]:
    """Return the flags that count the embedding or the loss as a layer."""
    embedding, loss = layout.account_for_embedding_in_pipeline_split, layout.account_for_loss_in_pipeline_split
    return [flag for flag, is_on in ((_EMBEDDING, embedding), (_LOSS, loss)) if is_on]


def _per_stage(config: Config) -> list[float]:
    """Return the layers of each kind of stage, with embedding and loss where they count as layers; fractions where they
    do not divide."""
    layout, stages = config.layout, config.layout.pipeline_model_parallel_size
    ends = [layout.decoder_first_pipeline_num_layers, layout.decoder_last_pipeline_num_layers]
    of_ends = [count for count in ends if count is not None]
    rest, others = config.model.num_layers + counted_as_layers(layout) - sum(of_ends), stages - len(of_ends)
    return [*of_ends, *([rest / others] if others > 0 else [])]


def _arithmetic(config: Config) -> str:
    """Return how the layers of a stage come about."""
    layout = config.layout
    ends, counted = _given_ends(layout), _counted(layout)
    layers = f"--num-layers {config.model.num_layers}" + "".join(f" + 1 ({flag})" for flag in counted)
    return ", ".join([f"{layers} / --pipeline-model-parallel-size {layout.pipeline_model_parallel_size}", *ends])


def _uneven_splits(layers: int, stages: int, chunks: int, ends: Sequence[str] = ()) -> list[str]:
    """Flags that split layers over stages which do not divide them: one example of each kind that works.

    Args:
        ends: the flags of end stages to use; None for the first stage's alone, or those that count embedding and loss.
    """
    if stages < 2 or layers % chunks:
        return []
    fixes = []
    if not ends:
        counting = [_EMBEDDING, f"{_EMBEDDING} {_LOSS}"]
        fixes += [flags for flags in counting if (layers + len(flags.split())) % (stages * chunks) == 0][:1]
    flags = list(ends) or [_FIRST]
    between = stages - len(flags)
    # Rather fewer layers than the others on the ends: they also have the embedding and the loss.
    for others in (-(-layers // stages // chunks) * chunks, layers // stages // chunks * chunks):
        left = layers - between * others
        if others > 0 and left >= len(flags) * chunks:
            half = left // 2 // chunks * chunks
            sizes = [left] if len(flags) == 1 else [left - half, half]
            return [*fixes, " ".join(f"{flag} {size}" for flag, size in zip(flags, sizes, strict=True))]
    return fixes


def _even_layout(layers: int, stages: int, depths: int = 0) -> str:
    """Return a layout string without interleaving, as even as it can be."""
    size, rest = divmod(layers, stages)
    return "E" + "|".join(f"t*{size + (stage < rest)}" for stage in range(stages)) + "m" * depths + "L"


_OF_THE_SPLIT = (
    layers_are_split_in_one_way,
    layout_string_is_right,
    layers_divide_over_stages,
    end_stages_leave_the_rest_even,
    layers_divide_over_chunks,
)

RULES = all_read_the_layout(
    (
        *_OF_THE_SPLIT,
        interleaving_needs_stages,
        microbatches_pass_in_whole_groups,
        schedule_suits_the_layout,
    )
)
