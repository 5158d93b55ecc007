"""Initial values: a function of (seed, name), cut the same way whatever the shard, in little memory."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.parameters import Parameter, parameters
from megatron_ext.model import initialize as module
from megatron_ext.model.initialize import BLOCK_ELEMENTS, fill
from megatron_ext.parallel.rows import RowShard, mark
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


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("parameter", [TALL, WIDE, PADDED], ids=lambda parameter: parameter.name)
def test_shards_are_slices_of_the_whole(parameter: Parameter, size: int) -> None:
    assert parameter.shape[0] * parameter.shape[1] > 3 * BLOCK_ELEMENTS
    whole = _filled(parameter)
    assert parameter.tp_dim is not None
    parts = [part.chunk(size, parameter.tp_dim) for part in whole.chunk(parameter.tp_stride, parameter.tp_dim)]
    for rank in range(size):
        expected = torch.cat([part[rank] for part in parts], parameter.tp_dim)
        assert torch.equal(_filled(parameter, rank, size), expected)


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


MEASURED = """
import resource, torch
from megatron_ext.config.parameters import Parameter, parameters
from megatron_ext.model.initialize import fill

fill(torch.empty(1024, 128), Parameter("warm.weight", (1024, 1024), 0, "normal", 0.02, tp_dim=1), 1, 0, 8)
parameters = [Parameter("big.weight", (8 * 6400, 1024), 0, "normal", 0.02, tp_dim=dim) for dim in (0, 1)]
shards = [torch.empty(parameter.local_shape(8)).zero_() for parameter in parameters]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for shard, parameter in zip(shards, parameters):
    fill(shard, parameter, 1, 3, 8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


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


@pytest.mark.parametrize(("own", "init"), [(None, "uniform"), (0.02, "uniform"), (0.03, "normal")])
def test_an_embedding_begins_as_a_matrix_unless_it_has_a_deviation_of_its_own(own: float | None, init: str) -> None:
    """One that is --init-method-std is none of its own, as in Megatron-LM."""
    model = {"init_method_xavier_uniform": True, "init_method_std": 0.02, "embedding_init_method_std": own}
    found = {one.name: (one.init, one.std) for one in parameters(small_config(model))}
    kind, deviation = found["embedding.word_embeddings.weight"]
    assert kind == init
    assert deviation == pytest.approx(0.03 if init == "normal" else (2.0 / (256 + 64)) ** 0.5)


@pytest.mark.parametrize("bf16", [False, True])
def test_each_weight_is_filled_as_the_part_that_its_ranks_hold(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows from their first one on, as 16-bit weights where these are computed with; an expert's matrix as the part of
    the ranks that divide experts."""
    config = small_config({"num_experts": 4, "disable_bias_linear": True}, training={"bf16": bf16, "seed": 17})
    dense, stacked = (
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.0.mlp.experts.2:4.linear_fc2.weight",
    )
    rows, experts = torch.nn.Parameter(torch.zeros(3, 64)), torch.nn.Parameter(torch.zeros(2, 64, 48))
    mark(rows, RowShard(torch.zeros(3, 64), 5, (64, 64), None))
    whole = torch.nn.Parameter(torch.zeros(64))
    named = [(dense, rows), (stacked, experts), ("decoder.final_layernorm.weight", whole)]
    monkeypatch.setattr(module, "global_named_parameters", lambda chunks: iter(named))
    filled: list[tuple[object, ...]] = []

    def fill_in(shard: torch.Tensor, parameter: Parameter, *given: object, **named: object) -> None:
        filled.append((parameter.name, shard.shape, *given, named))
        shard.fill_(1.0 + 2.0**-9)

    monkeypatch.setattr(module, "fill", fill_in)
    sizes = {"tp": (1, 2), "expt_tp": (3, 4)}
    groups: Any = SimpleNamespace(
        **{
            name: SimpleNamespace(rank=lambda rank=rank: rank, size=lambda size=size: size)
            for name, (rank, size) in sizes.items()
        }
    )
    module.initialize([], config, groups)
    assert filled == [
        (dense, (3, 64), 17, 1, 2, {"first_row": 5}),
        ("decoder.layers.0.mlp.experts.2.linear_fc2.weight", (64, 48), 17, 3, 4, {}),
        ("decoder.layers.0.mlp.experts.3.linear_fc2.weight", (64, 48), 17, 3, 4, {}),
        ("decoder.final_layernorm.weight", (64,), 17, 1, 2, {}),
    ]
    held: Any = rows
    assert held.row_shard.local.unique().tolist() == [1.0 if bf16 else 1.0 + 2.0**-9]
    assert experts.unique().tolist() == [1.0 + 2.0**-9]


def test_a_row_longer_than_a_block_is_a_block() -> None:
    """Part of the rule by which weights begin: other blocks would be other weights."""
    for columns, rows in ((BLOCK_ELEMENTS + 1, 1), (BLOCK_ELEMENTS, 1), (BLOCK_ELEMENTS // 2, 2), (1000, 1048)):
        assert module._rows_per_block(Parameter("long.weight", (4, columns), 0, "normal", 0.02)) == rows
