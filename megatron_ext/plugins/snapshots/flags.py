"""The flags of snapshots, with Megatron's names and meaning."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import free


@dataclass(frozen=True)
class SnapshotFlags:
    """Options of snapshots in the memory of the machines."""

    non_persistent_save_interval: int | None = free(
        None,
        "Steps between two snapshots into the memory of each machine, which a restart finds first; the newest two are "
        "kept.",
        at_least=1,
    )
    non_persistent_ckpt_type: str | None = free(
        None, "Kind of snapshots: local, each rank's own in --non-persistent-local-ckpt-dir.", choices=("local",)
    )
    non_persistent_local_ckpt_dir: str | None = free(
        None, "Folder of snapshots on every machine, in memory: /dev/shm/snapshots for example."
    )
    replication: bool = free(False, "Keep a copy of every rank's snapshots on another machine, too.")
    replication_jump: int | None = free(
        None, "How many ranks further the copy goes; default the ranks of a machine: to the next one.", at_least=1
    )


FLAGS = (("checkpoint", SnapshotFlags),)
