"""--verify-data background compares the data with the checksums of its manifest while the run trains on it."""

from megatron_ext import environment
from megatron_ext.data.checksums import BackgroundCheck, Block
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class DataCheck(Callback):
    """Ends the run, with exit code 65, at the end of the step in which a damaged block was found.

    Args:
        blocks: what this rank compares: its share of what the ranks of its machine read.
    """

    def __init__(self, blocks: list[Block]):
        self._check = BackgroundCheck(blocks, processes=environment.local_world_size())

    def ends_before_next(self, trainer: Trainer) -> bool:
        return False

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self._check.check()

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self._check.close()

    def on_end(self, trainer: Trainer) -> None:
        self._check.close()
