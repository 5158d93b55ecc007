"""The options of what is traced: some steps, by Nsight Systems or torch's profiler, and the history of GPU memory."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import ReadWith, free

_PROFILES = ReadWith("profile", "without --profile no step is traced")
_OF_STEPS = ReadWith(("profile", "record_schedule"), "without --profile or --record-schedule no step is recorded")
_MEMORY = ReadWith("record_memory_history", "without --record-memory-history no memory is recorded")


@dataclass(frozen=True)
class ProfilingConfig:
    """Options of profiling."""

    profile: bool = free(
        False,
        "Mark the steps of the range for `nsys profile --capture-range=cudaProfilerApi`; with --use-pytorch-profiler, "
        "which a CPU needs, write torch's traces instead.",
    )
    profile_step_start: int = free(10, "First step that is profiled.", read_with=_OF_STEPS)
    profile_step_end: int = free(12, "First step that no longer is profiled.", read_with=_OF_STEPS)
    profile_ranks: tuple[int, ...] | None = free(
        None, "Ranks that profile, and record memory or the schedule; default all of them.", metavar="RANK ..."
    )
    use_pytorch_profiler: bool = free(
        False,
        "With --profile: a Chrome trace per rank, profile/rankN.json in --save, else in --tensorboard-dir, else here.",
        read_with=_PROFILES,
    )
    pytorch_profiler_collect_shapes: bool = free(
        False, "Put the tensors' shapes into torch's trace.", read_with=_PROFILES
    )
    pytorch_profiler_collect_callstack: bool = free(
        False, "Put the callers' lines into torch's trace.", read_with=_PROFILES
    )
    pytorch_profiler_collect_chakra: bool = free(
        False,
        "Write a Chakra execution trace (the graph of operators) beside torch's trace.",
        read_with=_PROFILES,
    )
    record_shapes: bool = free(
        False, "Put every operator and its tensors' shapes into Nsight's trace.", read_with=_PROFILES
    )
    nvtx_ranges: bool = free(False, "Put megatron-core's own ranges into Nsight's trace.", read_with=_PROFILES)
    record_schedule: bool = free(
        False,
        "From --profile-step-start to --profile-step-end, record which pass of the pipeline each rank runs when, and "
        "its waits: a trace per rank, schedule/rankN.json in --save, else in --tensorboard-dir, else here, for "
        "tools/draw_pipeline.py and Perfetto. All ranks wait for each other before such a step.",
    )
    record_memory_history: bool = free(
        False,
        "Record every allocation of GPU memory; written at each log line, at the end, and when the run fails, to be "
        "opened at pytorch.org/memory_viz.",
    )
    memory_snapshot_path: str = free(
        "snapshot.pickle",
        "File of the recorded memory; the rank is put before its suffix.",
        read_with=_MEMORY,
    )
