"""How many of the launcher's ranks a run uses, and how the others wait for its end."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.cli import pretrain
from megatron_ext.config.parse.command_line import read
from megatron_ext.errors import ConfigurationError, PeerLostError
from megatron_ext.resilience import elastic
from tests.support.forked import Forked


@pytest.mark.parametrize(
    ("launched", "model", "microbatches", "used"),
    [
        (4, 1, 8, 4),
        (3, 1, 8, 2),  # one is a spare
        (7, 2, 8, 4),
        (8, 2, 12, 8),
        (1, 2, 8, 0),  # waits: two would do
        (3, 4, 8, 0),
    ],
)
def test_as_many_ranks_as_the_layout_can_use(launched: int, model: int, microbatches: int, used: int) -> None:
    values = {"global_batch_size": 2 * microbatches, "micro_batch_size": 2, "tensor_model_parallel_size": model}

    def works(ranks: int) -> bool:
        return ranks % model == 0 and microbatches % (ranks // model) == 0

    assert elastic.ranks_to_use(launched, values, works) == used


def test_the_most_ranks_that_work_are_used_whatever_the_layout() -> None:
    """Against all numbers of replicas, tried one by one."""
    for tensor, pipeline, context, micro, batch in itertools.product((1, 2), (1, 3), (1, 2), (1, 2), (6, 8, 9, 0)):
        values = {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "context_parallel_size": context,
            "micro_batch_size": micro,
            "global_batch_size": batch,
        }
        model = tensor * pipeline * context
        sizes = [model * replicas for replicas in range(1, 10) if batch and batch % (micro * replicas) == 0]
        for launched in range(1, 30):
            fewer = [size for size in sizes if size <= launched]
            expected = max(fewer) if fewer else 0 if sizes else None
            assert elastic.ranks_to_use(launched, values, lambda size, sizes=sizes: size in sizes) == expected


def test_what_no_number_of_ranks_mends_is_left_to_the_check_of_the_flags() -> None:
    values = {"global_batch_size": 8, "micro_batch_size": 1}
    assert elastic.ranks_to_use(3, values, lambda ranks: False) is None
    assert elastic.ranks_to_use(3, {"micro_batch_size": "x"}, lambda ranks: False) is None
    assert elastic.ranks_to_use(3, {"global_batch_size": 1, "micro_batch_size": 1}, lambda ranks: ranks == 1) == 1
    assert elastic.ranks_to_use(3, {**values, "tensor_model_parallel_size": "x"}, lambda ranks: ranks == 8) is None


Launch = Callable[..., None]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Sets a launcher's variables, and forgets the spares of the test."""
    monkeypatch.setattr(elastic, "_spares", 0)

    def launch(**variables: Any) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return launch


@pytest.mark.parametrize(
    ("rank", "local", "here", "takes_part", "left_here"),
    [
        (0, 0, 2, True, 2),
        (1, 1, 2, True, 2),
        (2, 0, 2, True, 1),
        (3, 1, 2, False, 2),
        (1, 1, 4, True, 3),
        (2, 2, 4, True, 3),
    ],
)
def test_the_first_ranks_train_and_know_how_many_they_are(
    launch: Launch, rank: int, local: int, here: int, takes_part: bool, left_here: int
) -> None:
    launch(RANK=rank, LOCAL_RANK=local, WORLD_SIZE=4, LOCAL_WORLD_SIZE=here)
    assert elastic.take_part(3) == takes_part
    assert os.environ["WORLD_SIZE"] == ("3" if takes_part else "4")
    assert os.environ["LOCAL_WORLD_SIZE"] == str(left_here)


@pytest.fixture
def store(launch: Launch) -> TCPStore:
    """The store of torchrun's agent, to which the ranks of five connect."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    launch(MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port, WORLD_SIZE=5, LOCAL_RANK=0, LOCAL_WORLD_SIZE=5)
    return store


def run(rank: int, patience: float = 60.0, steps: float = 0.0, spares: int = 2) -> None:
    """A rank of a run that uses three of five ranks and takes some seconds."""
    os.environ["RANK"] = str(rank)
    elastic._PATIENCE, elastic._BETWEEN_LOOKS, elastic._BETWEEN_BEATS = patience, 0.05, 0.1
    elastic._FOR_SPARES = 0.5 if spares == 0 else 60.0
    if elastic.take_part(3):
        elastic.keep_spares()
        time.sleep(steps)
        elastic.dismiss_spares()
        print("the run is over")
        return
    try:
        elastic.wait_as_spare(5, 3)
        print("a spare is dismissed")
    except PeerLostError as lost:
        print(lost)


@pytest.mark.usefixtures("store")
def test_spares_wait_as_long_as_the_run_lives_and_leave_before_its_store_ends(begin: Callable[..., Forked]) -> None:
    first = begin(run, 3, 1.0)
    assert first.lives_for(0.2)
    rank_0 = begin(run, 0, 1.0, 1.6)
    assert begin(run, 1, 1.0).ended() == (0, "the run is over\n"), "rank 0 alone waits for the spares"
    said = "elastic: 5 ranks are there, of which the layout uses 3; the others wait as spares\na spare is dismissed\n"
    assert first.ended() == (0, said), "it was more patient than for a second: it heard of the run"
    assert rank_0.lives_for(0.3), "the second spare has not left"
    assert begin(run, 4, 1.0).ended() == (0, "a spare is dismissed\n"), "the first spare says it for all"
    assert rank_0.ended() == (0, "the run is over\n")


@pytest.mark.usefixtures("store")
def test_a_run_does_not_wait_for_ever_for_its_spares(begin: Callable[..., Forked]) -> None:
    assert begin(run, 0, 1.0, 0.0, 0).ended() == (0, "the run is over\n")


def test_a_spare_ends_when_nobody_is_heard_of(store: TCPStore, begin: Callable[..., Forked]) -> None:
    store.set("elastic/beat", "the last")
    code, said = begin(run, 4, 0.3).ended()
    assert code == 0
    assert said.startswith("this rank is a spare, and the ranks that train have not been heard of for 0.3 s; torchrun ")


def hold_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    print(store.port)
    time.sleep(600.0)


def test_a_spare_ends_with_the_store_of_rank_0(launch: Launch, begin: Callable[..., Forked]) -> None:
    rank_0 = begin(hold_store)
    rank_0.says("\n")
    launch(MASTER_ADDR="127.0.0.1", MASTER_PORT=rank_0.said.strip(), WORLD_SIZE=5, LOCAL_RANK=0, LOCAL_WORLD_SIZE=5)
    spare = begin(run, 4)
    assert spare.lives_for(0.3)
    rank_0.send_signal(signal.SIGKILL)
    assert "this rank is a spare, and rank 0 is gone: " in spare.ended()[1]


def test_a_launcher_that_would_take_no_machine_in_is_refused(launch: Launch) -> None:
    launch(TORCHELASTIC_RUN_ID="run", TORCHELASTIC_USE_AGENT_STORE="True")
    flags = ["--num-layers", "2", "--global-batch-size", "8", "--micro-batch-size", "1"]
    assert pretrain._is_needed(read(flags))
    with pytest.raises(ConfigurationError, match=f"set {elastic.NO_SHARED_STORE}=1 in the environment of every tor"):
        pretrain._is_needed(read([*flags, "--elastic"]))
