"""Which data files a rank compares with the checksums of their manifests, and when (--verify-data).

--verify-data background compares the data with the checksums of its manifest while the run trains on it.
"""

import torch

from megatron_ext import environment
from megatron_ext.config.schema import Config
from megatron_ext.data.data_manifest import REMEDY, BackgroundCheck, Block, first_damage, known_blocks, some_blocks
from megatron_ext.data.splits import SPLITS, split_files
from megatron_ext.errors import DataError
from megatron_ext.terminal import warn
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


def check_before_the_first_step(config: Config) -> None:
    """Compare what --verify-data asks for before the run begins. Collective where there is a process group.

    Raises:
        DataError: a block is not as it was written; the same on every rank.
    """
    if config.data.verify_data == "off" or config.data.mock_data:
        return
    everything = config.data.verify_data == "start"
    blocks, without = blocks_of_run(config)
    if everything and without and environment.rank() == 0:
        warn(f"--verify-data start: no manifest has checksums of {', '.join(without)}, which is not verified")
    problem = first_damage(share(blocks if everything else some_blocks(blocks)))
    problems = [problem]
    if torch.distributed.is_initialized():  # not in the tools
        problems = [problem] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(problems, problem)
    named = next((one for one in problems if one is not None), None)
    if named is not None:
        raise DataError(f"{named}. {REMEDY}")


def blocks_of_run(config: Config) -> tuple[list[Block], list[str]]:
    """Return the blocks of all files of the run of which there are checksums, and the files without."""
    splits = [files for split in SPLITS if (files := split_files(config, split)) is not None]
    prefixes = dict.fromkeys(prefix for files in splits for prefix in files.blend.prefixes)
    known = {prefix: known_blocks(prefix) for prefix in prefixes}
    return [block for blocks in known.values() for block in blocks], [name for name, got in known.items() if not got]


def share(blocks: list[Block]) -> list[Block]:
    """Return this rank's part of what the ranks of one machine compare together."""
    return blocks[environment.local_rank() :: environment.local_world_size()]


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
