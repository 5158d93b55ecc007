"""Initial values: a function of (seed, name), cut the same way whatever the shard, in little memory."""

import itertools
import math
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.model import initialize
from megatron_ext.model.initialize import BLOCK_ELEMENTS, WHOLE_ELEMENTS, column_parts, fill
from megatron_ext.parallel.rows import RowShard, mark
from megatron_ext.parts.catalogue import Parameter, parameters
from tests.support.small_models import small_config
from tests.support.warm_python import warm_python

# 3 blocks and a remainder, none of whose edges falls on a shard's.
TALL = Parameter("tall.weight", (3312, 1000), 0, "normal", 0.02, tp_dim=0, tp_stride=2)
WIDE = Parameter("wide.weight", (3312, 1000), 0, "normal", 0.02, tp_dim=1)
PADDED = Parameter("padded.weight", (3312, 1000), "embedding", "normal", 0.02, tp_dim=0, true_rows=3301)


def _filled(parameter: Parameter, rank: int = 0, size: int = 1, seed: int = 1, dtype: torch.dtype = torch.float32):
    shard = torch.full(parameter.local_shape(size), torch.nan, dtype=dtype)
    fill(shard, parameter, seed, rank, size)
    return shard


@pytest.mark.parametrize(
    ("parameter", "size"),
    [*itertools.product([TALL, WIDE, PADDED], [2, 4, 8]), (WIDE, 5)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_shards_are_slices_of_the_whole(parameter: Parameter, size: int) -> None:
    assert parameter.shape[0] * parameter.shape[1] > 3 * BLOCK_ELEMENTS
    whole = _filled(parameter)
    assert parameter.tp_dim is not None
    parts = [part.chunk(size, parameter.tp_dim) for part in whole.chunk(parameter.tp_stride, parameter.tp_dim)]
    for rank in range(size):
        expected = torch.cat([part[rank] for part in parts], parameter.tp_dim)
        assert torch.equal(_filled(parameter, rank, size), expected)


@pytest.mark.parametrize("parameter", [TALL, WIDE, PADDED], ids=lambda parameter: parameter.name)
def test_rows_of_a_shard_are_rows_of_it(parameter: Parameter) -> None:
    shard = _filled(parameter, 1, 4)
    for first, last in ((0, 5), (3, 700), (len(shard) - 1, len(shard))):
        rows = torch.full((last - first, shard.shape[1]), torch.nan)
        fill(rows, parameter, 1, 1, 4, first_row=first)
        assert torch.equal(rows, shard[first:last])


@pytest.mark.parametrize("parameter", [TALL, WIDE], ids=lambda parameter: parameter.name)
def test_the_number_of_threads_changes_nothing(parameter: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _filled(parameter, 1, 4)
    for threads in (1, 2, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(_filled(parameter, 1, 4), expected)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count numbers in place of drawing them."""
    counts: list[int] = []

    def counted(numbers: np.ndarray, parameter: Parameter, seed: str) -> None:
        counts.append(numbers.size)
        numbers.fill(0.0)

    monkeypatch.setattr(initialize, "_fill_numbers", counted)
    return counts


FC2 = Parameter("fc2.weight", (1024, 14336), 0, "normal", 0.02, tp_dim=1)  # columns of Llama 3 8B
FC1 = Parameter("fc1.weight", (28672, 1024), 0, "normal", 0.02, tp_dim=0, tp_stride=2)
EXPERT = Parameter("expert.weight", (2048, 768), 0, "normal", 0.02, tp_dim=1, expert=0)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
@pytest.mark.parametrize("parameter", [FC2, EXPERT], ids=lambda parameter: parameter.name)
def test_a_rank_draws_only_the_columns_that_it_keeps(parameter: Parameter, size: int, drawn: list[int]) -> None:
    for rank in {0, size // 2, size - 1}:
        fill(torch.empty(parameter.local_shape(size), device="meta"), parameter, 1, rank, size)
        assert sum(drawn) == parameter.size // size
        drawn.clear()


@pytest.mark.parametrize(("size", "parts"), [(7, 11), (56, 3), (128, 1), (896, 1)])
def test_ranks_that_do_not_divide_the_parts_draw_a_part_more(size: int, parts: int, drawn: list[int]) -> None:
    """Columns of 2^11 * 7 in 64 parts: a seventh has 9.14 of them, and touches 11 at most."""
    for rank in range(size):
        fill(torch.empty(FC2.local_shape(size), device="meta"), FC2, 1, rank, size)
        assert sum(drawn) <= parts * FC2.size // 64
        drawn.clear()


@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_rank_draws_few_rows_that_it_does_not_keep(size: int, drawn: list[int]) -> None:
    """It draws whole blocks: at most two more than it keeps, for each of the pieces of its shard."""
    fill(torch.empty(FC1.local_shape(size), device="meta"), FC1, 1, size - 1, size)
    assert FC1.size // size <= sum(drawn) <= FC1.size // size + 4 * BLOCK_ELEMENTS


def test_a_data_parallel_shard_of_rows_draws_few_blocks(drawn: list[int]) -> None:
    fill(torch.empty(16, 14336, device="meta"), FC2, 1, first_row=512)
    assert sum(drawn) <= 2 * BLOCK_ELEMENTS
    drawn.clear()
    fill(torch.empty(16, 14336 // 8, device="meta"), FC2, 1, 3, 8, first_row=512)
    assert sum(drawn) <= 2 * BLOCK_ELEMENTS // 8


def test_columns_are_cut_by_the_shape_alone() -> None:
    assert [column_parts(parameter) for parameter in (TALL, WIDE, FC1, FC2, EXPERT)] == [1, 8, 1, 64, 64]
    small = Parameter("small.weight", (512, WHOLE_ELEMENTS // 512), 0, "normal", 0.02, tp_dim=1)
    assert column_parts(small) == 1
    assert column_parts(Parameter("whole.weight", (1024, 1024), 0, "normal", 0.02)) == 1, "no rank has a part of it"
    assert torch.equal(_filled(small), _filled(Parameter(small.name, small.shape, 0, "normal", 0.02)))


@pytest.mark.parametrize("init", ["normal", "uniform"])
def test_parts_of_a_block_are_independent_and_of_equal_variance(init: Any) -> None:
    """Bounds are five standard errors of 64 parts of 16,384 numbers."""
    parameter = Parameter("square.weight", (1024, 1024), 0, init, 0.02, tp_dim=1)
    assert column_parts(parameter) == 64
    parts = torch.stack([part.reshape(-1) for part in _filled(parameter).double().chunk(64, dim=1)]) / 0.02
    error = 5.0 / math.sqrt(parts.shape[1])
    assert parts.mean(dim=1).abs().max() < error
    assert (parts.var(dim=1) - 1.0).abs().max() < error * math.sqrt(2.0)
    correlations = torch.corrcoef(parts) - torch.eye(64, dtype=torch.float64)
    assert correlations.abs().max() < error
    sums = parts.sum(dim=0)  # parts that go together would make it larger, or smaller
    assert abs(sums.var() / 64.0 - 1.0) < error * math.sqrt(2.0)


def test_padding_is_zero_and_takes_nothing_from_the_vocabulary() -> None:
    whole = _filled(PADDED)
    assert torch.count_nonzero(whole[3301:]) == 0
    more = Parameter(PADDED.name, (4096, 1000), "embedding", "normal", 0.02, tp_dim=0, true_rows=3301)
    assert torch.equal(_filled(more)[:3301], whole[:3301])
    none = Parameter(PADDED.name, (3301, 1000), "embedding", "normal", 0.02, tp_dim=0)
    assert torch.equal(_filled(none), whole[:3301])


def test_values_are_normal_and_blocks_and_names_and_seeds_differ() -> None:
    whole = _filled(TALL)
    standard = (whole / 0.02).double()
    assert abs(standard.mean()) < 5e-3
    assert abs(standard.std() - 1.0) < 5e-3
    rows = BLOCK_ELEMENTS // 1000
    assert not torch.equal(whole[:rows], whole[rows : 2 * rows])
    assert not torch.equal(whole, _filled(WIDE))
    assert not torch.equal(whole, _filled(TALL, seed=2))
    assert not torch.equal(whole, _filled(TALL, seed=1 + 2**32))


def test_16_bit_weights_are_the_rounded_fp32_ones() -> None:
    assert torch.equal(_filled(TALL, 1, 4, dtype=torch.bfloat16), _filled(TALL, 1, 4).bfloat16())


def test_ones_and_zeros() -> None:
    assert torch.equal(_filled(Parameter("n.weight", (5,), 0, "ones")), torch.ones(5))
    assert torch.equal(_filled(Parameter("n.bias", (8,), 0, "zeros", tp_dim=0), 1, 2), torch.zeros(4))


def test_pinned_values() -> None:
    """A change of the rule would change every model of every user: it must be seen."""
    whole = _filled(TALL)
    assert whole[0, :3].tolist() == [-0.01814197562634945, 0.007869462482631207, 0.018126346170902252]
    assert whole[-1, -3:].tolist() == [0.0011175211984664202, -4.003165668109432e-05, -0.001566845690831542]
    wide = _filled(WIDE)
    assert wide[0, :3].tolist() == [-0.001522240461781621, -0.03730744123458862, -0.0298402588814497]
    assert wide[-1, -3:].tolist() == [-0.02402273565530777, -0.028441254049539566, -0.02961171232163906]


MEASURED = """
import resource, torch
from megatron_ext.parts.catalogue import Parameter
from megatron_ext.model.initialize import fill

torch.get_num_threads = lambda: 8  # blocks under way; threads of torch's own would only spin
fill(torch.empty(1024, 128), Parameter("warm.weight", (1024, 1024), 0, "normal", 0.02, tp_dim=1), 1, 0, 8)
parameters = [Parameter("big.weight", (8 * 6400, 1024), 0, "normal", 0.02, tp_dim=dim) for dim in (0, 1)]
shards = [torch.empty(parameter.local_shape(8)).zero_() for parameter in parameters]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for shard, parameter in zip(shards, parameters):
    fill(shard, parameter, 1, 3, 8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.full
def test_a_rank_needs_little_more_memory_than_its_slice(tmp_path: Path) -> None:
    """Shards of 26 MB out of 210: the whole would be seen at once in the peak of a process of its own."""
    program = tmp_path / "program.py"
    program.write_text(MEASURED)
    command = [warm_python(tmp_path)["PYTHON_EXEC"], str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 64 * 2**20


def test_xavier_uniform_is_torchs() -> None:
    """Uniform up to the root of 6 over rows and columns together: the bound, and the second and fourth moment."""
    config = small_config({"init_method_xavier_uniform": True, "ffn_hidden_size": 4096, "hidden_size": 256})
    [matrix] = [one for one in parameters(config) if one.name == "decoder.layers.0.mlp.linear_fc1.weight"]
    assert matrix.shape == (4096, 256)
    values, bound = _filled(matrix).double(), (6.0 / (4096 + 256)) ** 0.5
    torchs = torch.nn.init.xavier_uniform_(torch.empty(4096, 256), generator=torch.Generator().manual_seed(0)).double()
    assert 0.999 * bound < values.abs().max() <= bound * (1 + 2.0**-23)
    for power in (2, 4):
        assert values.pow(power).mean() == pytest.approx(torchs.pow(power).mean().item(), rel=0.01)
    assert abs(values.mean()) < 0.01 * bound


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_each_weight_is_filled_as_the_part_that_its_ranks_hold(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows from their first one on, as bf16 weights where these are computed with; an expert's matrix as the part of
    the ranks that divide experts."""
    config = small_config(
        {"num_experts": 4, "disable_bias_linear": True},
        training={"bf16": precision == "bf16", "fp16": precision == "fp16", "seed": 17},
    )
    dense, stacked = (
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.0.mlp.experts.2:4.linear_fc2.weight",
    )
    rows, experts = torch.nn.Parameter(torch.zeros(3, 64)), torch.nn.Parameter(torch.zeros(2, 64, 48))
    mark(rows, RowShard(torch.zeros(3, 64), 5, (64, 64), None))
    whole = torch.nn.Parameter(torch.zeros(64))
    named = [(dense, rows), (stacked, experts), ("decoder.final_layernorm.weight", whole)]
    monkeypatch.setattr(initialize, "global_named_parameters", lambda chunks: iter(named))
    filled: list[tuple[object, ...]] = []

    def fill_in(shard: torch.Tensor, parameter: Parameter, *given: object, **named: object) -> None:
        filled.append((parameter.name, shard.shape, *given, named))
        shard.fill_(1.0 + 2.0**-9)

    monkeypatch.setattr(initialize, "fill", fill_in)
    sizes = {"tp": (1, 2), "expt_tp": (3, 4)}
    groups: Any = SimpleNamespace(
        **{
            name: SimpleNamespace(rank=lambda rank=rank: rank, size=lambda size=size: size)
            for name, (rank, size) in sizes.items()
        }
    )
    initialize.initialize([], config, groups)
    assert filled == [
        (dense, (3, 64), 17, 1, 2, {"first_row": 5}),
        ("decoder.layers.0.mlp.experts.2.linear_fc2.weight", (64, 48), 17, 3, 4, {}),
        ("decoder.layers.0.mlp.experts.3.linear_fc2.weight", (64, 48), 17, 3, 4, {}),
        ("decoder.final_layernorm.weight", (64,), 17, 1, 2, {}),
    ]
    held: Any = rows
    assert held.row_shard.local.unique().tolist() == [1.0 if precision == "bf16" else 1.0 + 2.0**-9]
    assert experts.unique().tolist() == [1.0 + 2.0**-9]


def test_a_row_longer_than_a_block_is_a_block() -> None:
    """Part of the rule by which weights begin: other blocks would be other weights."""
    for columns, rows in ((BLOCK_ELEMENTS + 1, 1), (BLOCK_ELEMENTS, 1), (BLOCK_ELEMENTS // 2, 2), (1000, 1048)):
        assert initialize._rows_per_block(Parameter("long.weight", (4, columns), 0, "normal", 0.02)) == rows


@pytest.mark.parametrize(("cores", "blocks", "threads"), [(1, 4, []), (3, 2, [2]), (3, 9, [3]), (100, 20, [8])])
def test_as_many_threads_draw_as_torch_may_use(
    cores: int, blocks: int, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight at most, each with a block of 4 MB, and no more than there are blocks."""
    asked: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int):
            asked.append(workers)
            super().__init__(1)

    monkeypatch.setattr(initialize, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(initialize, "BLOCK_ELEMENTS", 8)
    parameter = Parameter("many.weight", (2 * blocks, 4), 0, "normal", 0.02)
    filled = _filled(parameter)
    assert asked == threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(filled, _filled(parameter))
