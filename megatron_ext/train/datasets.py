"""Makes the datasets of a run, and checks whether they match the checkpoint that the run resumes from.

It also says which data files a rank compares with the checksums of their manifests, and when (--verify-data): before
the first step, or while the run trains on them.
"""

import os

import torch

from megatron_ext import environment
from megatron_ext.checkpoint.native.resume import Resume
from megatron_ext.config.derived import batch_size
from megatron_ext.config.schema import Config
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.data_manifest import (
    REMEDY,
    BackgroundCheck,
    Block,
    Judged,
    first_damage,
    judge,
    known_blocks,
    made_with,
    some_blocks,
)
from megatron_ext.data.data_record import data_record, differences
from megatron_ext.data.samples import Samples
from megatron_ext.data.splits import SPLITS, split_files
from megatron_ext.data.stored import exists
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.terminal import say, warn
from megatron_ext.tokenizer.from_flags import tokenizer_from_flags
from megatron_ext.tokenizer.simple import NullTokenizer
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer
from megatron_ext.train.extensions import NONE, Extensions
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


def samples_of_run(config: Config) -> Splits[int]:
    """Return the samples that the planned length of the run reads, and the samples of one evaluation, 0 where there is
    none."""
    training = config.training
    evaluates = training.eval_interval > 0 and (training.eval_iters > 0 or training.full_validation)
    held_out = max(training.eval_iters, 1) * batch_size.evaluation_batch(config)[0] if evaluates else 0
    return Splits(batch_size.training_samples(config), held_out, held_out)


def samples_of_step(config: Config, step: int) -> range:
    """Return positions of the samples that a step uses, in a run that has these flags from its beginning.

    Raises:
        ConfigurationError: there is no such step.
    """
    steps = batch_size.training_steps(config)
    if not 1 <= step <= steps:
        raise ConfigurationError(f"step {step}: the training has steps 1 to {steps}")
    first = batch_size.samples_at_iteration(config, step - 1)
    return range(first, first + batch_size.global_batch_size(config, first))


def samples_of_order(config: Config, resume: Resume | None) -> int:
    """Return the number of samples that the training order is made for.

    megatron-core's order depends on it where the data is read more than once. A run that resumes with another batch
    size or end therefore takes the number in the checkpoint's data record, as long as it is enough.
    """
    needed = samples_of_run(config).train
    record = resume.data_record if resume is not None else None
    if record is None or config.checkpoint.finetune or config.data.data_order != "shuffled":
        return needed
    return max(needed, record["num_samples"])


def tokenizer_of_run(config: Config) -> Tokenizer:
    """Return the tokenizer named by the flags; for synthetic data without one, a tokenizer that only knows ids."""
    data = config.data
    return tokenizer_from_flags(data) if data.tokenizer_type else NullTokenizer(data.vocab_size)


def datasets_of_run(
    config: Config, tokenizer: Tokenizer, resume: Resume | None = None, extensions: Extensions = NONE
) -> Splits[Samples | None]:
    """Return training data, and where it is evaluated, validation and test data. Collective.

    Raises:
        DataError: another tokenizer than the run's made the data, or it is not as it was written.
        TrainingError: as `build_datasets`.
    """
    _check_tokenizer_made_the_data(config, tokenizer)
    check_before_the_first_step(config)
    _warn_of_masks_that_are_not_read(config)
    wanted = samples_of_run(config)
    numbers = Splits(samples_of_order(config, resume), wanted.valid, wanted.test)
    return extensions.own_datasets(config, tokenizer, numbers) or build_datasets(config, tokenizer, numbers)


def _check_tokenizer_made_the_data(config: Config, tokenizer: Tokenizer) -> None:
    """Compare the run's tokenizer with the manifests next to the data. Collective where there is a process group."""
    verdicts = _judged_tokenizers(config, tokenizer)
    ranks = [verdicts]
    if torch.distributed.is_initialized():  # not in the tools
        ranks = [verdicts] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, verdicts)
    verdicts = max(ranks, key=lambda judged: (any(one.is_wrong for one in judged), len(judged)))
    wrong = [one.text for one in verdicts if one.is_wrong]
    if wrong and not config.data.accept_other_tokenizer:
        raise DataError(
            f"{'; '.join(wrong)}. Give the tokenizer that made the data, preprocess it with the run's, or add "
            "--accept-other-tokenizer to train on these ids as they are"
        )
    for one in verdicts if os.environ.get("RANK", "0") == "0" else ():
        warn(one.text)


def _warn_of_masks_that_are_not_read(config: Config) -> None:
    if config.data.mock_data or config.data.assistant_only_loss or os.environ.get("RANK", "0") != "0":
        return
    splits = [files for split in SPLITS if (files := split_files(config, split)) is not None]
    masked = {prefix: files.flag for files in splits for prefix in files.blend.prefixes if exists(prefix, ".mask")}
    for prefix, flag in masked.items():
        warn(
            f"{flag} {prefix} has a mask of what is trained on, and all its tokens count in the loss: "
            "--assistant-only-loss reads the mask"
        )


def _judged_tokenizers(config: Config, tokenizer: Tokenizer) -> list[Judged]:
    """Yield warnings about the tokenizers of the data, once for each file."""
    if config.data.mock_data:
        return []
    splits = [files for split in SPLITS if (files := split_files(config, split)) is not None]
    named = {prefix: f"{files.flag} {prefix}" for files in splits for prefix in files.blend.prefixes}
    known = [(what, made) for prefix, what in named.items() if (made := made_with(prefix)) is not None]
    return [judged for what, made in known if (judged := judge(what, made, tokenizer)) is not None]


def check_data_is_that_of_the_checkpoint(run: Run, resume: Resume) -> None:
    """Compare the data with the data that the checkpoint was trained on. Collective.

    Raises:
        DataError: the data differs, on some node; every rank names it. --accept-changed-data makes it a warning.
    """
    saved = resume.data_record
    texts = differences(saved, run.data_record) if saved is not None and run.data_record is not None else []
    nodes: list[list[str]] = [[] for _ in range(run.world_size)]
    torch.distributed.all_gather_object(nodes, texts)
    texts = next((node for node in nodes if node), [])
    if not texts:
        return
    text = f"the data is not that of the checkpoint {resume.path}: {'; '.join(texts)}"
    if not run.config.checkpoint.accept_changed_data:
        raise DataError(
            f"{text}. Put back what it was, or add --accept-changed-data to go on: samples may then be repeated or "
            "left out"
        )
    if run.rank == 0:
        say(f"warning: {text}")


def record_of_run(config: Config, train: Samples, resume: Resume | None) -> dict | None:
    """Return the data's record, on one rank of each node; None on the others, which would read the same files."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    return data_record(config, train, samples_of_order(config, resume))


def check_before_the_first_step(config: Config) -> None:
    """Compare the data blocks that --verify-data asks for before the run begins with their checksums. Collective where
    there is a process group.

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
    """Return this rank's part of the blocks that the ranks of one machine compare together."""
    return blocks[environment.local_rank() :: environment.local_world_size()]


class DataCheck(Callback):
    """Ends the run, with exit code 65, at the end of the step in which a damaged block was found.

    Args:
        blocks: blocks that this rank compares: its share of the blocks that the ranks of its machine read.
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
