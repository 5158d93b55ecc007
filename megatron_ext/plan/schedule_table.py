"""Has a pipeline's schedule that is a table (`pipeline_tables.py`) next to those of `schedule.py`."""

import functools
from dataclasses import dataclass

from megatron_ext.config.derived.pipeline_split import v_shaped
from megatron_ext.config.derived.pipeline_table import rank_of
from megatron_ext.config.schema import Config
from megatron_ext.pipeline_tables import Rows, rows
from megatron_ext.plan.schedule import Schedule, Work
from megatron_ext.untrusted.schedule_csv import read_schedule

_HALVES = {"F": "", "B": "", "I": "inputs", "W": "weights"}


@dataclass(frozen=True)
class TableSchedule(Schedule):
    """A schedule that is said pass by pass. `stages` are ranks here, as in every `Schedule`."""

    rows: Rows = ()
    v_shaped: bool = False
    """Whether a rank's second chunk is the one as far from the end as the first is from the beginning."""

    weights_share: float = 0.5
    """Share of a backward pass that the gradients of the weights take."""

    def order(self, stage: int) -> tuple[Work, ...]:
        return tuple(
            Work(kind == "F", virtual // self.stages, microbatch, _HALVES[kind])
            for virtual, kind, microbatch in self.rows[stage]
        )

    def table(self) -> Rows:
        return self.rows

    def share(self, work: Work) -> float:
        return {"": 1.0, "inputs": 1.0 - self.weights_share, "weights": self.weights_share}[work.half]

    def rank_of(self, virtual: int) -> int:
        return rank_of(virtual, self.stages, v_shaped=self.v_shaped)

    def few(self) -> "TableSchedule":
        return self

    @property
    def bubble(self) -> float:
        return _bubble(self)

    @property
    def least_bubble(self) -> float:
        return 0.0


@functools.lru_cache(maxsize=64)
def _bubble(schedule: TableSchedule) -> float:
    """Return how long the busiest rank waits, in microbatches, where all chunks are alike and F, I and W take as long
    as each other."""
    of_all = [[1.0 / schedule.chunks] * schedule.chunks] * schedule.stages
    total = schedule.total(of_all, [[2 * each for each in chunks] for chunks in of_all], 0.0)
    return total / 3.0 - schedule.microbatches


def schedule_of(config: Config, microbatches: int) -> Schedule:
    """Return the schedule that the flags ask for.

    Raises:
        TextError, OSError: the file cannot be read.
    """
    layout, name = config.layout, config.layout.table
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if name is None or stages == 1:
        return Schedule(stages, chunks, microbatches, layout.microbatch_group_size if chunks > 1 else 1)
    return named(name, stages, chunks, microbatches)


def named(name: str, stages: int, chunks: int, microbatches: int) -> TableSchedule:
    """Return a schedule of torch by its name, or one of a file.

    Raises:
        TextError, OSError: the file cannot be read.
    """
    found = read_schedule(name) if name.endswith(".csv") else rows(name, stages, chunks, microbatches)
    return TableSchedule(stages, chunks, microbatches, rows=found, v_shaped=v_shaped(name, stages))
