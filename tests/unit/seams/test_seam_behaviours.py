"""Public functions of the engine behave as this program relies on: what docs/libraries.md says of torch and
megatron-core, where a line of ours is there because of it.

test_seam_canaries.py does the same for private names.
"""

import math
import queue
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, num_microbatches_calculator
from megatron.core.datasets import blended_megatron_dataset_builder
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.moe import moe_utils
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ext import pipeline_tables
from megatron_ext.model.config import transformer_config
from tests.support.engine_accesses import ROOT
from tests.support.small_models import small_config

# Of the second tier: what an upgrade of the engine changes.
pytestmark = pytest.mark.full


def _casts_to_8_bits() -> None:
    given = torch.tensor([math.inf, -math.inf, math.nan, 500.0])
    narrow, wide = (given.to(kind).float() for kind in (torch.float8_e4m3fn, torch.float8_e5m2))
    assert [narrow[0], narrow[1], narrow[3]] == [448.0, -448.0, 448.0]
    assert [wide[0], wide[1], wide[3]] == [math.inf, -math.inf, 512.0]
    assert narrow[2].isnan()
    assert wide[2].isnan()


def _sums_of_an_embedding() -> None:
    weight = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    torch.embedding(weight, torch.zeros(1000, dtype=torch.long)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 256


def _rows_of_grouped_products() -> None:
    rows = torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True)
    matrices, ends = torch.ones(2, 16, 16, dtype=torch.bfloat16), torch.tensor([3, 8], dtype=torch.int32)
    product = F.grouped_mm(rows, matrices, offs=ends)
    product.backward(torch.ones_like(product))
    assert rows.grad is not None
    assert product.unique().tolist() == rows.grad.unique().tolist() == [16.0]


def _in_flight(name: str) -> list[int]:
    """Return for each of four ranks the most chunks of microbatches that have gone forward and whose input has no
    gradient yet, of 8 microbatches and two chunks of the model."""
    found = []
    for row in pipeline_tables.rows(name, 4, 2, 8):
        live = [0]
        for action in row:
            live.append(live[-1] + (action.kind == "F") - (action.kind in "BI"))
        found.append(max(live))
    return found


def _tables() -> None:
    found = {name: _in_flight(name) for name in ("interleaved-zero-bubble", "zbv", "dualpipe-v")}
    assert found == {
        "interleaved-zero-bubble": [8, 7, 6, 5],
        "zbv": [8, 8, 8, 8],
        "dualpipe-v": [9, 9, 9, 9],  # a pair of passes is one after the other here
    }


def _ramp_up() -> None:
    calculator = num_microbatches_calculator
    calculator.init_num_microbatches_calculator(1, [4, 4, 64], 16, 2, 1)
    try:
        calculator.update_num_microbatches(0)
        assert calculator.get_current_global_batch_size() == 16
    finally:
        calculator.unset_num_microbatches_calculator()


def _masks_of_padding() -> None:
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(8) < 2
    without = moe_utils.z_loss_func(logits[~mask], 1.0)
    torch.testing.assert_close(moe_utils.z_loss_func(logits, 1.0, mask), without)
    probabilities, load = logits.softmax(-1), torch.ones(4)
    masked, of_masked = (
        moe_utils.switch_load_balancing_loss_func(given, load, 8, 1, 4, 1.0, padding_mask=where)
        for given, where in ((probabilities, mask), (probabilities * mask[:, None], None))
    )
    torch.testing.assert_close(masked, of_masked)


def _positions_within_a_capacity() -> None:
    chosen = torch.ones(16, 2, dtype=torch.bool)
    weights = torch.rand(16, 2, generator=torch.Generator().manual_seed(0))
    kept = moe_utils.apply_router_token_dropping(weights, chosen, 2, 0.25, "position")[1]
    assert kept[:, 0].sum() == 4
    assert kept[:, 0].nonzero().flatten().tolist() != [0, 1, 2, 3]


def _sizes_of_a_blend() -> None:
    sizes = blended_megatron_dataset_builder._get_size_per_split_per_dataset([0.7, 0.2, 0.1], [10], 0.005)
    assert sizes == [[8], [3], [2]]


def _common_state(folder: Path) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    before, filesystem_async._results_queue = filesystem_async._results_queue, queue.SimpleQueue()  # pyright: ignore
    try:
        weight = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", torch.ones(2))
        dist_checkpointing.save({"iteration": 5, "weight": weight}, str(folder))
    finally:
        filesystem_async._results_queue = before
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert sorted(entries) == ["common_state/shard_0_1", "weight"]
    assert not (folder / "common.pt").exists()


def _fields() -> None:
    transformer_config(small_config(), "cpu")


class Behaviour(NamedTuple):
    """What the engine does, and which file of ours is as it is because of it."""

    relied_on_by: str
    check: Callable[[], None] | Callable[[Path], None]


BEHAVIOURS: dict[str, Behaviour] = {
    "torch: a cast to float8_e4m3fn makes 448 of infinity and keeps NaN; one to float8_e5m2 keeps both": Behaviour(
        "plugins/low_precision/quantize.py", _casts_to_8_bits
    ),
    "torch: on a CPU the gradient of a bf16 embedding is added up in bf16": Behaviour(
        "device/wide_sums.py", _sums_of_an_embedding
    ),
    "torch: grouped_mm writes all rows where the last offset is the last row": Behaviour(
        "parts/experts/compute.py", _rows_of_grouped_products
    ),
    "torch: how many microbatches are in flight in tables of pipelines": Behaviour("pipeline_tables.py", _tables),
    "megatron-core: TransformerConfig has every field that we set": Behaviour("model/config.py", _fields),
    "megatron-core: rampup_batch_size is ignored": Behaviour("config/derived/batch_size.py", _ramp_up),
    "megatron-core: z-loss leaves out what padding_mask has, the balancing loss all else": Behaviour(
        "parts/experts/router.py", _masks_of_padding
    ),
    "megatron-core: dropping by position does not keep the first tokens": Behaviour(
        "parts/experts/router.py", _positions_within_a_capacity
    ),
    "megatron-core: a blend of 10 samples has 8, 3 and 2": Behaviour("data/shuffled_order.py", _sizes_of_a_blend),
    "megatron-core: the common state of a checkpoint is an entry, and there is no common.pt": Behaviour(
        "plugins/checkpoint_tools/single_process.py", _common_state
    ),
}
"""By what is relied on."""


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(name: str, tmp_path: Path) -> None:
    behaviour = BEHAVIOURS[name]
    try:
        behaviour.check(*[tmp_path] * behaviour.check.__code__.co_argcount)
    except Exception as error:
        text = str(error).partition("\n")[0]
        pytest.fail(
            f"{name}: no more ({type(error).__name__}: {text}).\nUsed at megatron_ext/{behaviour.relied_on_by}",
            pytrace=False,
        )


def test_who_relies_on_a_behaviour_exists() -> None:
    assert [row for row in BEHAVIOURS.values() if not (ROOT / "megatron_ext" / row.relied_on_by).exists()] == []
