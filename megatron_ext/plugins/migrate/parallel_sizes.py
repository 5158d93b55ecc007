"""Computes what another program's configuration says about ranks and batch, and the sizes that follow."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.errors import ConfigurationError


@dataclass(frozen=True)
class Layout:
    """The sizes of the launch; None where the file does not determine one."""

    tensor: int
    context: int
    pipeline: int
    replicate: int
    """Number of copies of the shards (hybrid sharding)."""
    data: int | None
    """Data-parallel size, replicas of shards included."""
    micro_batch_size: int | None
    accumulation: int | None
    global_batch_size: int | None

    @property
    def world_size(self) -> int | None:
        """Number of ranks."""
        return None if self.data is None else self.tensor * self.context * self.pipeline * self.data

    def flags(self) -> dict[str, str]:
        """Return flag -> value of every size that is not our default."""
        sizes = {
            "--tensor-model-parallel-size": self.tensor,
            "--context-parallel-size": self.context,
            "--pipeline-model-parallel-size": self.pipeline,
            "--num-distributed-optimizer-instances": self.replicate,
        }
        of_sizes = {flag: str(size) for flag, size in sizes.items() if size > 1}
        batch = {"--micro-batch-size": self.micro_batch_size, "--global-batch-size": self.global_batch_size}
        return of_sizes | {flag: str(size) for flag, size in batch.items() if size is not None}

    def lines(self) -> list[str]:
        """Return the layout in words."""
        unknown = "?"
        data, world = (unknown if size is None else str(size) for size in (self.data, self.world_size))
        micro, steps, batch = (
            unknown if size is None else str(size)
            for size in (self.micro_batch_size, self.accumulation, self.global_batch_size)
        )
        lines = [
            f"world size       {world} = TP {self.tensor} x PP {self.pipeline} x CP {self.context} x DP {data}",
            f"effective batch  {micro} x {steps} x DP {data} = {batch} samples (TP, CP and PP do not count)",
        ]
        if self.data is None:
            lines.append("the file does not say how many ranks there are: give --world-size")
        return lines


def solve(facts: Mapping[str, int], world_size: int | None, default_accumulation: int | None) -> Layout:
    """Return the layout that `facts` determine.

    Args:
        facts: sizes by the names that `meanings.Fact` carries.
        world_size: number of ranks, where the file does not say it.
        default_accumulation: microbatches of a step where the file does not say it; None where it follows.
    Raises:
        ConfigurationError: a number is below 1, or the numbers contradict each other.
    """
    below = [f"{name.replace('_', ' ')} {size}" for name, size in facts.items() if size < 1]
    below += [f"--world-size {world_size}"] if world_size is not None and world_size < 1 else []
    if below:
        raise ConfigurationError([f"{size} is below 1; give a number from 1, or leave it out" for size in below])
    tensor, context, pipeline = (facts.get(name, 1) for name in ("tensor", "context", "pipeline"))
    replicate = facts.get("replicate", 1)
    world = facts.get("world_size", world_size)
    if world_size is not None and world != world_size:
        raise ConfigurationError(f"the file is for {world} ranks, not for --world-size {world_size}; leave it out")
    model = tensor * context * pipeline
    data = facts["shard"] * replicate if "shard" in facts else facts.get("data")
    if world is not None:
        if world % model or (data is not None and world != model * data) or (world // model) % replicate:
            shards = f" x shards {facts['shard']}" if "shard" in facts else f" x DP {data}" if data else ""
            raise ConfigurationError(
                f"{world} ranks are not TP {tensor} x PP {pipeline} x CP {context}{shards} x replicas {replicate}; "
                f"give --world-size {model * (data or replicate)}, or other sizes"
            )
        data = world // model
    batch = _batch(facts, data, facts.get("accumulation", default_accumulation))
    return Layout(tensor, context, pipeline, replicate, data, *batch)


def _batch(
    facts: Mapping[str, int], data: int | None, accumulation: int | None
) -> tuple[int | None, int | None, int | None]:
    """Return micro batch, accumulation and global batch: any two and the data-parallel size give the third."""
    micro, total = facts.get("micro_batch_size"), facts.get("global_batch_size")
    if data is None:
        return micro, accumulation, total
    if total is None:
        total = None if micro is None or accumulation is None else micro * accumulation * data
        return micro, accumulation, total
    known = [size for size in (micro, accumulation) if size is not None]
    product = data
    for size in known:
        product *= size
    if total % product or (len(known) == 2 and total != product):
        raise ConfigurationError(
            f"a global batch of {total} is not micro batch {micro or 'N'} x accumulation {accumulation or 'N'} x DP "
            f"{data}; change one of them, or the number of ranks"
        )
    rest = total // product
    return (micro or rest, accumulation or rest, total) if known else (None, None, total)
