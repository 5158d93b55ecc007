"""Every test process computes on the CPU, prepared as the program itself would be."""

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise every process that compiles starts workers for Triton, each of which imports torch; C++ asks none of them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A rank that sends holds a lock of gloo's: interrupted by the one that receives, it leaves its own thread to spin.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# A test that takes all memory fails by name: where the kernel ends its process instead, pytest-xdist may wait for ever.
# GPU drivers reserve more than there is.
if sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    resource.setrlimit(resource.RLIMIT_DATA, (half, resource.getrlimit(resource.RLIMIT_DATA)[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support import tiers
from tests.support.crashes import Disk
from tests.support.file_times import FileTimes

# Where fla-core is installed, transformers would call its GPU kernels for tensors in host memory.
sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]

_collection = ExitStack()


def _only_hands_out(config: pytest.Config) -> bool:
    """Return whether this is the process of pytest-xdist that gives tests to others and loads none of them itself."""
    shares = config.getoption("dist", "no") != "no" and not config.option.collectonly
    return shares and not hasattr(config, "workerinput")


@pytest.fixture(autouse=True)
def no_groups_are_left() -> Iterator[None]:
    """A test that starts process groups in this process must not leave them to the tests after it."""
    import torch

    yield
    if torch.distributed.is_initialized():
        from megatron_ext.parallel import groups

        groups.destroy()


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    """The program puts its own streams in the place of Python's; the next test has its own."""
    streams = sys.stdout, sys.stderr
    yield
    sys.stdout, sys.stderr = streams


@pytest.fixture
def watched_disk() -> Iterator[Callable[[Path], Disk]]:
    """Watches a folder, as a disk that loses what nobody waits for; `end` of what it returns ends that."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda folder: Disk(folder, patch)


LONG = (
    "test_examples.py",
    "test_guide_commands.py",
    "test_gpu_ranks.py",
    "test_new_run.py",
    "test_core_alone.py",
    "test_huggingface.py",
    "test_every_field.py",
    "test_matrix.py",
    "test_trials.py",
    "test_restarts.py",
    "test_extension.py",
    "test_elastic_agents.py",
    "test_optimizers_with_averages.py",
    "test_precision_on_resume.py",
    "test_catalogue.py",
    "test_deferred_reads.py",
    "test_cuda_path.py",
    "test_setup_in_a_new_shell.py",
    "test_checkpoint_layouts.py",
    "test_megatron_features.py",
    "test_kill_and_resume.py",
    "test_gated_delta.py",
    "test_inference.py",
    "test_composites.py",
    "test_forms_of_folders.py",
    "test_compile.py",
    "test_planted_faults.py",
)
"""Files that take some twenty seconds or more."""


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_options(parser)
    parser.addoption("--file-times", action="store_true", help="say what each test file costs")


def pytest_configure(config: pytest.Config) -> None:
    tiers.choose(config)
    if config.getoption("--file-times"):
        config.pluginmanager.register(FileTimes())
    if _only_hands_out(config):
        return
    from megatron_ext import device
    from megatron_ext.forkserver import ranks
    from megatron_ext.gc_freeze import kept_from_the_collector

    # A rank imports the file of its test and with it pytest: a tenth of a second, for some hundreds of ranks.
    ranks.PRELOADED.append("pytest")

    # Torch, the engine and some thousand tests stay as long as the process: half a second for each look through them.
    _collection.enter_context(kept_from_the_collector())
    device.install("cpu")


def pytest_collection_finish() -> None:
    _collection.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files begin first, lest one process runs the last of them while the other has nothing left to do."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
