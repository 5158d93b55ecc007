"""Among whom weights are compared, and over whom norms are summed: the groups, by their names."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import contents, load
from megatron_ext.parts.catalogue import WORD_EMBEDDINGS
from megatron_ext.sharding import megatron_fsdp
from megatron_ext.sharding.ddp import DataParallel
from megatron_ext.train import replicas
from tests.support.small_models import small_config

NAMES = ("dp", "dp_cp", "expt_dp", "tp", "expt_tp", "embd", "mp", "tp_ep_pp", "intra_dist_opt", "ep", "cp", "pp")
GROUPS: Any = SimpleNamespace(**{name: name for name in NAMES})


def _parameter(*, expert: bool = False, divided: bool = False) -> Any:
    return SimpleNamespace(allreduce=not expert, tensor_model_parallel=divided)


PARAMETERS = [
    (WORD_EMBEDDINGS, _parameter(divided=True)),
    ("norm", _parameter()),
    ("matrix", _parameter(divided=True)),
    ("router of experts", _parameter(expert=True)),
    ("expert", _parameter(expert=True, divided=True)),
]


def _compared(monkeypatch: pytest.MonkeyPatch, check: Any, *, untied: bool = False) -> list[tuple[list[str], str]]:
    """Names of the weights, and the group that compares them."""
    seen: list[tuple[list[str], str]] = []

    def differences(named: Any, group: str, what: str) -> list[str]:
        seen.append(([name for name, _ in named], group))
        return []

    monkeypatch.setattr(replicas, "_differences", differences)
    monkeypatch.setattr(replicas, "_raise_together", lambda *_: None)
    monkeypatch.setattr(replicas, "global_named_parameters", lambda chunks: iter(PARAMETERS))
    config = small_config({"untie_embeddings_and_output_weights": untied})
    check(SimpleNamespace(groups=GROUPS, chunks=[], config=config), 0)
    return seen


def test_replicas_are_compared_with_those_that_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Context-parallel ranks hold the same weights, too."""
    assert _compared(monkeypatch, replicas.check_data_parallel_replicas) == [
        ([WORD_EMBEDDINGS, "norm", "matrix"], "dp_cp"),
        (["router of experts", "expert"], "expt_dp"),
    ]


def test_copies_are_compared_within_their_own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    of_tensor_ranks = [(["norm"], "tp"), (["router of experts"], "expt_tp")]
    check = replicas.check_model_parallel_copies
    assert _compared(monkeypatch, check) == [*of_tensor_ranks, ([WORD_EMBEDDINGS], "embd")]
    assert _compared(monkeypatch, check, untied=True) == of_tensor_ranks


@pytest.mark.parametrize(
    ("ranks", "hashes", "said"),
    [
        ([4, 6, 8], [1, 2, 1], "rank 6 differs from ranks 4, 8 in"),
        ([4, 5, 6, 7, 8], [1, 2, 1, 3, 1], "ranks 5, 7 differ from ranks 4, 6, 8 in"),
        ([0, 2], [1, 2], "ranks 0, 2 do not agree, and no majority says who is right, in"),
        ([0, 1, 2, 3], [1, 1, 2, 2], "ranks 0, 1, 2, 3 do not agree, and no majority says who is right, in"),
        ([0, 1, 2, 3], [1, 1, 2, 3], "ranks 0, 1, 2, 3 do not agree, and no majority says who is right, in"),
    ],
)
def test_more_than_half_are_a_majority(ranks: list[int], hashes: list[int], said: str) -> None:
    assert replicas._who_is_wrong(ranks, hashes) == said


@pytest.mark.parametrize(
    ("strategy", "divides_copies", "group"),
    [
        ("no_shard", False, "mp"),
        ("optim", False, "intra_dist_opt"),
        ("optim_grads", False, "intra_dist_opt"),
        ("optim_grads_params", False, "intra_dist_opt"),
        ("optim_grads_params", True, torch.distributed.group.WORLD),
    ],
)
def test_who_holds_one_copy_under_megatron_fsdp(strategy: str, divides_copies: bool, group: Any) -> None:
    chunk: Any = SimpleNamespace(strategy=strategy, divides_copies=divides_copies)
    assert megatron_fsdp._holders_of_one_copy(chunk, GROUPS) == group


def test_who_holds_one_copy_without_shards() -> None:
    optimizer: Any = None
    assert DataParallel(small_config()).holders_of_one_copy(optimizer, GROUPS) == ("mp", "tp_ep_pp")


def _rows(strategy: str, *, expert: bool = False, divides_copies: bool = False) -> tuple[Any, int, int, Any]:
    """Where the rows 3 and 4 of a weight of 8 rows are: group, replica, first row, and shape."""

    def group(name: str, rank: int, size: int) -> Any:
        return SimpleNamespace(name=name, rank=lambda: rank, size=lambda: size)

    groups: Any = SimpleNamespace(
        dp_cp=group("dp_cp", 5, 8),
        intra_dp_cp=group("intra_dp_cp", 1, 2),
        expt_dp=group("expt_dp", 3, 4),
        intra_expt_dp=group("intra_expt_dp", 1, 2),
    )
    weight = torch.nn.Parameter(torch.zeros(8, 4))
    buffer = SimpleNamespace(param_idx={weight: 0}, _get_item_slice_in_shard=lambda index: (12, 20))
    parts = SimpleNamespace(main_weight_buffer=None, model_weight_buffer=buffer, is_expert_param=expert)
    chunk: Any = SimpleNamespace(
        strategy=strategy,
        divides_copies=divides_copies,
        param_and_grad_buffer=SimpleNamespace(parameter_groups=[parts], param_to_param_group={weight: 0}),
    )
    sharded = SimpleNamespace(orig_param=weight, _local_tensor=torch.zeros(2, 4))
    found = megatron_fsdp.MegatronFSDPChunk._rows(chunk, sharded, groups)
    return getattr(found.group, "name", None), found.replica, found.first, found.shape


def test_whose_rows_they_are_under_megatron_fsdp() -> None:
    """Rank 5 of 8: of four copies of two shards the third; of the experts' two copies the second."""
    assert _rows("optim_grads") == ("intra_dp_cp", 2, 3, (8, 4))
    assert _rows("optim_grads", expert=True) == ("intra_expt_dp", 1, 3, (8, 4))
    assert _rows("optim_grads_params", divides_copies=True) == ("dp_cp", 0, 3, (8, 4))
    assert _rows("no_shard") == (None, 5, 0, (8, 4))


@pytest.mark.parametrize(("device", "exchange"), [("cuda", "broadcast"), ("cpu", "gather_object")])
def test_who_reads_a_checkpoint_together(device: str, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that hold the same weights, context-parallel ranks too; the engine's broadcast needs a GPU."""
    monkeypatch.setattr(
        load, "FullyParallelLoadStrategyWrapper", lambda own, group, exchange_algo: (group, exchange_algo)
    )
    run: Any = SimpleNamespace(groups=GROUPS, device=SimpleNamespace(kind=device))
    run.config = SimpleNamespace(checkpoint=SimpleNamespace(ckpt_fully_parallel_load=True))
    assert load._reading(run) == ("dp_cp", exchange)
    run.config.checkpoint.ckpt_fully_parallel_load = False
    assert isinstance(load._reading(run), load.TorchDistLoadShardedStrategy)


class _Group:
    def __init__(self, ranks: int):
        self.size = lambda: ranks


def test_weights_are_written_in_turn_by_those_that_hold_them() -> None:
    """The largest first, each by whoever has the least to write; experts by their own copies. The engine takes the
    replica with the number 0 for the one that writes."""
    groups: Any = SimpleNamespace(dp_cp=_Group(3), expt_dp=_Group(2))

    def weight(elements: int, *, expert: bool = False) -> Any:
        data: Any = torch.zeros(elements)
        data.allreduce = not expert
        return SimpleNamespace(data=data, replica_id=(0, 0, 1))

    weights: Any = {"a": weight(5), "b": weight(9), "c": weight(4), "d": weight(4), "e": weight(7, expert=True)}
    weights["f"] = weight(6, expert=True)
    models = contents.Contents({}, weights, {}, {})
    contents._spread(models, SimpleNamespace(groups=groups))  # pyright: ignore[reportArgumentType]
    assert models.replicas == dict.fromkeys(weights, 1), "where they were"
    writers = {name: (1 - one.replica_id[-1]) % (2 if name in "ef" else 3) for name, one in weights.items()}
    assert writers == {"b": 0, "a": 1, "c": 2, "d": 2, "e": 0, "f": 1}
    assert all(one.replica_id[:-1] == (0, 0) and one.replica_id[-1] in range(3) for one in weights.values())
