"""What only one rank sees: a signal, a deadline, a stop file. All ranks do the same at the same step."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world

from megatron_ext import device
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.parallel import groups
from megatron_ext.resilience.signals import SignalWatcher
from megatron_ext.train.callbacks.stopping import Stopping
from megatron_ext.verify.ranks import run_ranks

EVENTS = ("SIGTERM", "SIGINT", "stop file", "deadline")
ON_ALL = "SIGTERM on all"
REASONS = {"SIGTERM": "SIGTERM", "SIGINT": "SIGINT", "deadline": "--exit-duration-in-mins is over"}


def _stops(event: str, file: Path) -> list[list[tuple[str, bool, bool]]]:
    """On one of two ranks: what the trainer is told after a step without, and one with the event on rank 1, and
    whether the stop is one for all restarts where SIGTERM is none."""
    sees = torch.distributed.get_rank() == 1
    told: list[tuple[str, bool, bool]] = []
    trainer: Any = SimpleNamespace(
        run=SimpleNamespace(
            world_size=2, device=SimpleNamespace(torch_device="cpu"), state=SimpleNamespace(iteration=3)
        ),
        stop_votes=None,
    )
    with SignalWatcher(stop_file=file if sees and event == "stop file" else None) as watcher:
        stopping = Stopping(watcher, None, 10.0, elastic=True)
        trainer.stop = lambda reason, by_signal=False: told.append((reason, by_signal, watcher.for_good))
        stopping.on_step_end(trainer, None)  # pyright: ignore[reportArgumentType]
        before = list(told)
        if sees and event == "deadline":
            stopping.deadline = time.monotonic()
        elif sees and event == "stop file":
            file.touch()
        elif event == ON_ALL:
            os.kill(os.getpid(), signal.SIGTERM)
        elif sees:
            os.kill(os.getpid(), getattr(signal, event))
        stopping.on_step_end(trainer, None)  # pyright: ignore[reportArgumentType]
    return [before, told]


def _all_events(folder: str) -> tuple[list[list[list[tuple[str, bool, bool]]]], set[timedelta]]:
    """The same for every event, and the time limits of all groups of a layout with a limit of 7 minutes."""
    layout = LayoutConfig(world_size=2, tensor_model_parallel_size=2, distributed_timeout_minutes=7.0)
    groups.initialize(layout, device.install("cpu"))
    made: Any = list(_world.pg_map)
    limits = {group._get_backend(torch.device("cpu")).options._timeout for group in made}
    assert len(made) > 3
    return [_stops(event, Path(folder) / "stop") for event in (*EVENTS, ON_ALL)], limits


def test_all_ranks_stop_for_what_rank_1_alone_has_seen(tmp_path: Path) -> None:
    (first, limits), (second, also) = run_ranks(2, _all_events, str(tmp_path))
    # torchrun takes all ranks down by SIGTERM: a stop for this launch, however many have seen it.
    assert first.pop() == second.pop() == [[], [("SIGTERM", True, False)]]
    for event, (before, told), (before_too, told_too) in zip(EVENTS, first, second, strict=True):
        assert before == before_too == [], event
        [(reason, by_signal, for_good)], [(said, by_signal_too, for_good_too)] = told, told_too
        assert by_signal == by_signal_too == (event != "deadline"), event
        assert for_good == for_good_too == (event != "SIGTERM"), event
        assert said == REASONS.get(event, f"the file {tmp_path / 'stop'}")
        assert reason == (said if event == "deadline" else "another rank was asked to stop")
    # torch's limit is 5 s after that of the watch, which says who is to blame.
    assert limits == also == {timedelta(minutes=7, seconds=5)}
