"""How many of the launcher's ranks a run uses."""

import os
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.cli import pretrain
from megatron_ext.errors import ConfigurationError, PeerLostError
from megatron_ext.resilience import elastic


def works(model: int, replicas: int):
    """Whether the flags can work, for a layout of `model` ranks and a batch of so many microbatches."""
    return lambda ranks: ranks % model == 0 and replicas % (ranks // model) == 0


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
    assert elastic.ranks_to_use(launched, values, works(model, microbatches)) == used


def test_what_no_number_of_ranks_mends_is_left_to_the_check_of_the_flags() -> None:
    values = {"global_batch_size": 8, "micro_batch_size": 1}
    assert elastic.ranks_to_use(3, values, lambda ranks: False) is None
    assert elastic.ranks_to_use(3, {"micro_batch_size": "x"}, lambda ranks: False) is None
    assert elastic.ranks_to_use(3, {"global_batch_size": 1, "micro_batch_size": 1}, lambda ranks: ranks == 1) == 1
    assert elastic.ranks_to_use(3, {**values, "tensor_model_parallel_size": "x"}, lambda ranks: ranks == 8) is None


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
    monkeypatch: pytest.MonkeyPatch, rank: int, local: int, here: int, takes_part: bool, left_here: int
) -> None:
    launch = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": here}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(elastic, "_spares", 0)  # what this test leaves is not the next one's
    assert elastic.take_part(3) == takes_part
    assert elastic._spares == 1
    assert os.environ["WORLD_SIZE"] == ("3" if takes_part else "4")
    assert os.environ["LOCAL_WORLD_SIZE"] == str(left_here)


class _Store:
    """What the spares and rank 0 have in common; each count of who has left is one more than before."""

    def __init__(self, *keys: str):
        self.keys, self.looks, self.left = set(keys), 0, 0

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        if "gone" in self.keys:
            raise RuntimeError("connection reset")
        return set(keys) <= self.keys

    def get(self, key: str) -> bytes:
        return b"the same beat"

    def set(self, key: str, value: str) -> None:
        self.keys.add(key)

    def add(self, key: str, amount: int) -> int:
        assert key == elastic._LEFT
        self.looks += 1
        self.left += 1
        return self.left - 1 if amount == 0 else self.left


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    for name, seconds in {"_BETWEEN_LOOKS": 0.001, "_PATIENCE": 0.02, "_FOR_SPARES": 0.05}.items():
        monkeypatch.setattr(elastic, name, seconds)


@pytest.mark.usefixtures("quickly")
def test_a_spare_waits_for_the_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = _Store(elastic._OVER)
    monkeypatch.setattr(elastic, "_store", lambda: store)
    elastic.wait_as_spare(5, 3)
    assert store.left == 1
    assert "elastic: 5 ranks are there, of which the layout uses 3" in capsys.readouterr().out
    elastic.wait_as_spare(5, 2)
    assert capsys.readouterr().out == "", "the first spare says it for all"


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), "have not been heard of for 0.02 s"),
        ((elastic._BEAT,), "have not been heard"),
        (("gone",), "rank 0 is gone"),
    ],
)
def test_a_spare_ends_when_nobody_is_heard_of(
    keys: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_store", lambda: _Store(*keys))
    with pytest.raises(PeerLostError, match=said):
        elastic.wait_as_spare(5, 2)


@pytest.mark.usefixtures("quickly")
def test_a_spare_is_patient_as_long_as_the_run_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat each 0.03 s, which is looked for twice in that time; patience is for 0.02 s without another one."""
    clock, store = [0.0], _Store(elastic._BEAT)

    def sleep(seconds: float) -> None:
        clock[0] += 0.015
        if clock[0] > 0.13:
            store.keys.add(elastic._OVER)

    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(store, "get", lambda key: str(clock[0] // 0.03).encode())
    monkeypatch.setattr(elastic, "_store", lambda: store)
    elastic.wait_as_spare(5, 2)
    assert store.left == 1


@pytest.mark.usefixtures("quickly")
def test_rank_0_waits_until_the_spares_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    store = _Store()
    monkeypatch.setattr(elastic, "_store", lambda: store)
    for spares, looks in ((0, 0), (2, 3), (10**9, 4)):
        store.looks = store.left = 0
        monkeypatch.setattr(elastic, "_spares", spares)
        elastic.dismiss_spares()
        assert (store.looks == looks) if spares < 10 else (store.looks > looks), "or until the time is over"
    assert elastic._OVER in store.keys


def test_a_launcher_that_would_take_no_machine_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    flags = ["--num-layers", "2", "--global-batch-size", "8", "--micro-batch-size", "1"]
    assert pretrain._is_needed(flags)
    with pytest.raises(ConfigurationError, match=f"set {elastic.NO_SHARED_STORE}=1 in the environment of every tor"):
        pretrain._is_needed([*flags, "--elastic"])


@pytest.mark.usefixtures("quickly")
def test_each_spare_that_leaves_counts_and_rank_0_waits_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own store: two of three spares have left, the third leaves at the fourth look."""
    store, sleeps = HashStore(), []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 4:
            elastic.wait_as_spare(6, 3)

    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep)
    monkeypatch.setattr(elastic, "_store", lambda: store)
    monkeypatch.setattr(elastic, "_spares", 3)
    store.set(elastic._OVER, "1")
    for spare in (3, 4):
        monkeypatch.setenv("RANK", str(spare))
        elastic.wait_as_spare(6, 3)
        assert store.add(elastic._LEFT, 0) == spare - 2
    monkeypatch.setattr(elastic, "time", clock)
    monkeypatch.setenv("RANK", "1")
    elastic.dismiss_spares()
    assert sleeps == [], "rank 0 does it"
    monkeypatch.setenv("RANK", "0")
    elastic.dismiss_spares()
    assert len(sleeps) == 4
    assert store.add(elastic._LEFT, 0) == 3
    elastic.dismiss_spares()
    assert len(sleeps) == 4, "all have left"


@pytest.mark.parametrize(
    ("tensor", "pipeline", "context", "launched", "used"),
    [
        (1, 1, 1, 5, 4),
        (2, 1, 1, 5, 4),
        (1, 2, 1, 9, 8),
        (1, 1, 4, 9, 8),
        (2, 2, 2, 9, 8),
        (2, 2, 2, 7, 0),
        (2, 1, 4, 17, 16),
    ],
)
def test_each_dimension_of_the_model_counts(tensor: int, pipeline: int, context: int, launched: int, used: int) -> None:
    """Eight microbatches; the largest world that they are dealt to evenly, of whole models."""
    values = {
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
    }
    model = tensor * pipeline * context
    worlds = {model * replicas for replicas in (1, 2, 4, 8)}
    assert elastic.ranks_to_use(launched, values, worlds.__contains__) == used
    assert elastic.ranks_to_use(launched, values, lambda size: False) is None
    assert elastic.ranks_to_use(launched, values, lambda size: size == launched) == launched
