"""Checks GPUs: whether torch can use them, whether there are enough, how they are connected, and settings that
follow."""

from collections import Counter
from collections.abc import Iterator

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.device import hardware_queues
from megatron_ext.device.gpu_inventory import Survey, survey
from megatron_ext.doctor.finding import Finding, Launch, error, ok, warning


def gpus_work(launch: Launch) -> Iterator[Finding]:
    """Check the GPUs of this machine."""
    surveyed = survey()
    if surveyed is None:
        yield ok("no NVIDIA driver: the run takes CPU processes")
    else:
        yield from judge(launch, surveyed)


def judge(launch: Launch, surveyed: Survey) -> Iterator[Finding]:
    """Yield what is wrong with these GPUs for this launch."""
    if surveyed.cuda is None:
        yield error(
            f"torch {surveyed.torch} is built without CUDA, but there is an NVIDIA driver ({surveyed.driver})",
            "the run would take CPU processes",
            "pip install --force-reinstall torch, without an --index-url that ends in /cpu",
        )
        return
    if not surveyed.gpus:
        visible = launch.environment.get("CUDA_VISIBLE_DEVICES", "not set")
        yield error(
            f"torch (CUDA {surveyed.cuda}) sees no GPU; driver {surveyed.driver}, CUDA_VISIBLE_DEVICES {visible}",
            "the driver is too old for this CUDA, or no device is visible, or a container lacks --gpus all",
            "compare with `nvidia-smi`, whose head names the newest CUDA that the driver can",
        )
        return
    kinds = Counter(gpu.name for gpu in surveyed.gpus)
    yield ok(
        f"{', '.join(f'{n} x {name}' for name, n in kinds.items())}; driver {surveyed.driver}, CUDA {surveyed.cuda}, "
        f"NCCL {surveyed.nccl or 'missing'}"
    )
    if surveyed.nccl is None and launch.world_size > 1:
        yield error(f"torch {surveyed.torch} is built without NCCL", "GPUs cannot talk", "pip install torch for Linux")
    if launch.ranks > len(surveyed.gpus):
        yield error(
            f"{launch.ranks} ranks on this machine, but {len(surveyed.gpus)} GPUs",
            "each rank takes a GPU of its own",
            f"torchrun --nproc-per-node {len(surveyed.gpus)}",
        )
    if len(kinds) > 1:
        yield warning("the GPUs are of different kinds", "all wait for the slowest", "choose by CUDA_VISIBLE_DEVICES")
    yield from _occupied(surveyed)
    yield from _hardware_queues(launch, surveyed)
    yield from _connections(launch, surveyed)


def _occupied(surveyed: Survey) -> Iterator[Finding]:
    for gpu in surveyed.gpus:
        if gpu.free < 0.9 * gpu.total:
            yield warning(
                f"GPU {gpu.index}: only {gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB are free",
                "another process holds memory there, often what is left of an earlier run",
                "end what `nvidia-smi` lists there",
            )


def _hardware_queues(launch: Launch, surveyed: Survey) -> Iterator[Finding]:
    setting = launch.environment.get(hardware_queues.VARIABLE)
    # Without flags, those of a layout that could suffer.
    layout = launch.config.layout if launch.config else LayoutConfig(tensor_model_parallel_size=2)
    wrong = hardware_queues.mistake(layout, min(gpu.capability[0] for gpu in surveyed.gpus), setting)
    if wrong:
        yield warning(f"{hardware_queues.VARIABLE}={setting}", *wrong)


def _connections(launch: Launch, surveyed: Survey) -> Iterator[Finding]:
    if not surveyed.links:
        return
    kinds = Counter("NVLink" if kind.startswith("NV") else kind for kind in surveyed.links.values())
    yield ok(f"pairs of GPUs: {', '.join(f'{n} by {kind}' for kind, n in kinds.items())}")
    without = sum(n for kind, n in kinds.items() if kind != "NVLink")
    if without and launch.environment.get("NCCL_P2P_LEVEL", "").upper() == "NVL":
        yield warning(
            f"NCCL_P2P_LEVEL=NVL, but {without} of {len(surveyed.links)} pairs of GPUs have no NVLink",
            "between those it turns direct access off: data go through the machine's memory",
            "unset NCCL_P2P_LEVEL",
        )
    size = launch.config.layout.tensor_model_parallel_size if launch.config else 1
    far = [pair for pair, kind in surveyed.links.items() if kind == "SYS" and pair[0] // size == pair[1] // size]
    if size > 1 and far:
        yield warning(
            f"tensor-parallel ranks on GPUs {far[0][0]} and {far[0][1]} talk across the processors (SYS)",
            "tensor parallelism sends at every layer",
            "reorder CUDA_VISIBLE_DEVICES, or use a smaller --tensor-model-parallel-size",
        )


CHECKS = (gpus_work,)
