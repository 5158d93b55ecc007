"""What a run needs around a graph of its passes: when one is captured and dropped, what it keeps."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import full_cuda_graph
from megatron.core.full_cuda_graph import StaticBufferLoader
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext.data.microbatch import Batch
from megatron_ext.errors import ConfigurationError
from megatron_ext.train import build
from megatron_ext.train.captured_passes import CapturedPasses
from tests.support.recorded_graph import RecordedGraph, recorded_graphs
from tests.support.small_models import small_config


class _Watch:
    """Writes down what is seen, and what is seen again."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def seen(self) -> str:
        self.calls.append("seen")
        return "these"

    def see_again(self, seen: str) -> None:
        self.calls.append(f"{seen} again")


class _Schedule:
    """Adds what each microbatch's tokens sum up to to `total`, as gradients are added, and counts its own runs."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.runs = 0
        self.inside: Any = lambda: None

    def __call__(
        self, *, forward_step_func: Any, data_iterator: Any, num_microbatches: int, **_others: Any
    ) -> list[dict[str, torch.Tensor]]:
        self.runs += 1
        reports = []
        for _ in range(num_microbatches):
            summed = forward_step_func(data_iterator[0], "model")
            self.total += summed
            reports.append({"lm loss": summed})
        self.inside()
        return reports


def _forward_step(batches: Iterator[Batch], model: str) -> torch.Tensor:
    tokens = next(batches).tokens
    assert tokens is not None
    assert model == "model"
    return tokens.sum().float()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedGraph]]:
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(full_cuda_graph, "gc", SimpleNamespace(collect=lambda: None))  # of all that the tests hold
    tracker: Any = get_cuda_rng_tracker()
    monkeypatch.setattr(tracker, "states_", {"model-parallel-rng": torch.get_rng_state()})
    with recorded_graphs() as made:
        yield made


def _passes(schedule: Any, watch: _Watch | None = None, eager: int = 2, chunks: Any = ()) -> CapturedPasses:
    told: Any = watch or _Watch()
    return CapturedPasses(schedule, eager, chunks, told, lambda: None)


def _step(passes: CapturedPasses, *numbers: int) -> list[float]:
    """What the schedule reports of microbatches of these tokens."""
    batches = [Batch(tokens=torch.tensor([[number]])) for number in numbers]
    reports = passes(
        forward_step_func=_forward_step,
        data_iterator=[iter(batches)],
        model=["model"],
        num_microbatches=len(batches),
        seq_length=1,
        forward_only=False,
    )
    return [report["lm loss"].item() for report in reports]


def test_python_runs_until_the_capture_and_kernels_after_it(graphs: list[RecordedGraph]) -> None:
    schedule, watch = _Schedule(), _Watch()
    passes = _passes(schedule, watch)
    assert [_step(passes, 1, 2), _step(passes, 3, 4)] == [[1, 2], [3, 4]]
    assert (schedule.runs, graphs, watch.calls) == (2, [], [])
    assert [_step(passes, 5, 6), _step(passes, 7, 8), _step(passes, 9, 10)] == [[5, 6], [7, 8], [9, 10]]
    assert schedule.total.item() == sum(range(11)), "each step counts once, the captured one as well"
    assert (schedule.runs, [graph.replays for graph in graphs]) == (3, [3])
    assert watch.calls == ["seen", "these again", "these again", "these again"]


def test_another_number_of_microbatches_begins_anew(graphs: list[RecordedGraph]) -> None:
    schedule = _Schedule()
    passes = _passes(schedule, eager=1)
    for numbers in ((1,), (2,), (3,), (4, 5), (6, 7), (8, 9)):
        assert _step(passes, *numbers) == list(numbers)
    assert schedule.total.item() == 45
    assert [graph.replays for graph in graphs] == [2, 2]
    assert schedule.runs == 4
    assert len(StaticBufferLoader.static_buffers["training"]) == 2
    passes.release()
    assert StaticBufferLoader.static_buffers["training"] == []


def test_generators_are_there_again_after_the_capture(graphs: list[RecordedGraph]) -> None:
    tracker: Any = get_cuda_rng_tracker()
    before = tracker.get_states()
    passes = _passes(_Schedule(), eager=1)
    for number in range(3):
        _step(passes, number)
    assert len(graphs) == 1
    assert tracker.get_states() == before
    assert list(before) == ["model-parallel-rng"]


def _reads() -> None:
    torch.ones(()).item()


def _draws() -> None:
    tracker: Any = get_cuda_rng_tracker()
    with tracker.fork():
        pass


@pytest.mark.parametrize(("inside", "said"), [(_reads, "when stream is capturing"), (_draws, "cuda rng state")])
def test_what_cannot_be_captured_ends_the_run_by_the_flags_name(
    inside: Any, said: str, graphs: list[RecordedGraph]
) -> None:
    schedule = _Schedule()
    passes = _passes(schedule, eager=1)
    _step(passes, 1)
    schedule.inside = inside
    with pytest.raises(ConfigurationError, match=r"--cuda-graph-impl full_iteration.*leave --cuda-graph-impl out") as e:
        _step(passes, 2)
    assert said in str(e.value)
    assert list(get_cuda_rng_tracker().get_states()) == ["model-parallel-rng"]  # pyright: ignore


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("of 140 GB"), torch.distributed.DistError("a peer is lost")])
def test_other_troubles_keep_their_names(error: Exception, graphs: list[RecordedGraph]) -> None:
    schedule = _Schedule()
    passes = _passes(schedule, eager=1)
    _step(passes, 1)

    def fails() -> None:
        raise error

    schedule.inside = fails
    with pytest.raises(type(error)) as found:
        _step(passes, 2)
    assert found.value is error


class _Rotary(RotaryEmbedding):
    """Makes a table at each call."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def forward(self) -> torch.Tensor:  # pyright: ignore
        return torch.arange(3.0)


def test_tables_of_positions_are_kept_while_a_graph_reads_them(graphs: list[RecordedGraph]) -> None:
    """megatron-core's memory of them has room for 32 lengths."""
    rotary, schedule, made = _Rotary(), _Schedule(), []
    schedule.inside = lambda: made.append(rotary())
    passes = _passes(schedule, eager=1, chunks=[torch.nn.Sequential(rotary)])
    for number in range(3):
        _step(passes, number)
    assert [id(table) for table in passes._tables] == [id(made[1])]
    passes.release()
    assert passes._tables == []


@pytest.mark.parametrize("flag", ["full_iteration", "none"])
def test_graphs_are_made_where_the_configuration_has_them(flag: str) -> None:
    device: Any = SimpleNamespace(kind="cuda", synchronize=lambda: None)
    config = small_config(training={"cuda_graph_impl": flag, "cuda_graph_warmup_steps": 4})
    found = build.captured_passes(config, device, _Schedule(), [], _Watch())  # pyright: ignore[reportArgumentType]
    assert (found is not None) == (flag == "full_iteration")
    if found is not None:
        assert found._graph.cuda_graph_warmup_steps == 4
