"""Rules of snapshots."""

from collections.abc import Iterator

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.plugins.snapshots.flags import SnapshotFlags


def snapshots_have_a_place(config: Config, _facts: Facts) -> Iterator[str]:
    """Require the other flags that --non-persistent-save-interval needs."""
    flags, save = flags_of(config.checkpoint, SnapshotFlags), config.checkpoint.save
    interval, kind = flags.non_persistent_save_interval, flags.non_persistent_ckpt_type
    if interval is not None and kind is None:
        yield f"--non-persistent-save-interval {interval} needs a kind; add --non-persistent-ckpt-type local"
    if kind is not None and interval is None:
        yield f"--non-persistent-ckpt-type {kind} needs the steps between; add --non-persistent-save-interval 100"
    if kind is not None and flags.non_persistent_local_ckpt_dir is None:
        yield (
            f"--non-persistent-ckpt-type {kind} needs a folder in the machine's memory; add "
            "--non-persistent-local-ckpt-dir /dev/shm/snapshots"
        )
    if kind is not None and save is None:
        yield f"--non-persistent-ckpt-type {kind} needs --save, whose run the snapshots are of; add --save checkpoints"
    if flags.replication and kind is None:
        yield "--replication needs snapshots to copy; add --non-persistent-ckpt-type local, or leave the switch out"
    if flags.replication_jump is not None and not flags.replication:
        add = "--replication" if kind else "--replication --non-persistent-ckpt-type local"
        yield f"--replication-jump {flags.replication_jump} needs --replication; add {add}, or leave it out"


RULES = (snapshots_have_a_place,)
