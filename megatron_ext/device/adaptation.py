"""Replaces megatron-core's assumptions about CUDA in CPU processes: one table, and nothing outside of it.

Each row names the replaced object, its replacement, and where megatron-core 0.19.2 needs it. The replacements act on
torch, before megatron-core is imported, and mean "the CPU" wherever the engine says "cuda"; megatron-core itself is not
touched. `tests/distributed/test_adaptation.py` takes the rows away one by one and fails for a row that nothing misses,
so that the table shrinks when the engine learns to run without CUDA.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from megatron_ext.device.late_compiler import delay_compiler
from megatron_ext.device.shared_gloo import create_on_one_device
from megatron_ext.device.wide_sums import embedding_with_wide_sums, layer_norm_with_wide_sums


@dataclass(frozen=True)
class Replacement:
    """One row of the table: `name` is a dotted path; `make` gets the original object and returns its replacement."""

    name: str
    make: Callable[[Any], Any]
    why: str


class _NullStream:
    """Stands for a stream. CPU work runs in program order, so that a stream has nothing to order."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def wait_stream(self, _other: object) -> None:
        pass

    def wait_event(self, _event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> "_NullStream":
        return self

    def wait(self, _stream: object = None) -> None:
        """Do nothing, as an event: on a CPU, program order is the order in time."""


def _returns(value: Any) -> Callable[[Any], Any]:
    return lambda _original: lambda *_args, **_kwargs: value


def _names_cuda(device: Any) -> bool:
    """Return whether `device` means a GPU: "cuda", "cuda:1", torch.device("cuda"), or a bare index."""
    if isinstance(device, int):
        return True
    return str(device).startswith("cuda")


def _made_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and _names_cuda(device):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return "torch.cuda.FloatTensor" from `tensor.type()`, as the engine's optimizers expect."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


def _splits_as_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pass split sizes as numbers: on a GPU the engine fetches them to the host; here torch would get tensors."""

    @functools.wraps(original)
    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return original(*args, **kwargs)

    return all_to_all_single


def _gathers_unequal_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather parts of unequal sizes, filled up to the largest and cut again: gloo gathers parts of one size."""

    @functools.wraps(original)
    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        largest = max(part.size(0) for part in parts)
        if all(part.size(0) == largest for part in parts):
            return original(parts, own, group=group, **kwargs)
        filled = [part.new_zeros((largest, *part.shape[1:])) for part in parts]
        padded = own.new_zeros((largest, *own.shape[1:]))
        padded[: own.size(0)] = own
        original(filled, padded, group=group)
        for part, whole in zip(parts, filled, strict=True):
            part.copy_(whole[: part.size(0)])
        return None

    return all_gather


def _mesh_of_cpus(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a mesh of CPU processes, whatever device the engine names."""

    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(group, "cpu", *args, **kwargs)

    return from_group


def _gathers_one_by_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for torch's manager of coalesced collectives; gathers are issued one by one where it would coalesce
    them.

    gloo's coalesced gather corrupts the heap where its output is freed after the wait, as Megatron-FSDP does: two ranks
    with seven gathers in flight died within 2,000 rounds (torch 2.15), and not in 8,800 one by one.
    """

    @contextlib.contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        group = group or c10d._get_default_group()
        gathers = []
        with original(group, device, async_ops) as works:
            yield works
            recorded = c10d._world.pg_coalesce_state[group]
            if all(call.dst_tensor is not None and call.redop is None for call in recorded):
                gathers = list(recorded)
                recorded.clear()
        for call in gathers:
            works.append(call.op(call.dst_tensor, call.tensor, group=group, async_op=async_ops))

    return manager


def _nothing_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a sum or broadcast among one rank do nothing: gloo hands it to a thread, and it comes back as it was."""

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        if isinstance(group, c10d.ProcessGroup) and group.size() == 1 and not kwargs.get("async_op"):
            return None
        return original(*args, **kwargs)

    return collective


def _call_now(_original: Any) -> Callable[..., None]:
    return lambda callback, **_kwargs: callback()


# The alltoall dispatcher of a mixture of experts.
_FOR_EXPERTS = (
    Replacement(
        "torch.Tensor.new_empty", _made_on_cpu, "device=current_device() in _AllToAll, tensor_parallel/mappings.py:450"
    ),
    Replacement(
        "torch.distributed.all_to_all_single", _splits_as_numbers, "sizes as tensors, tensor_parallel/mappings.py:466"
    ),
    Replacement(
        "torch.distributed.all_gather", _gathers_unequal_parts, "tokens of tensor-parallel experts, mappings.py:154"
    ),
)

# Without these a run fails by chance, or only takes longer, so that no run of a few steps shows it.
_FOR_GLOO = (
    Replacement(
        "torch.distributed.all_reduce", _nothing_alone, "of gradients and their norm, param_and_grad_buffer.py"
    ),
    Replacement("torch.distributed.broadcast", _nothing_alone, "of the tokens of a step, finalize_model_grads.py"),
    Replacement(
        "torch.distributed._coalescing_manager", _gathers_one_by_one, "fsdp/src/megatron_fsdp/param_and_grad_buffer.py"
    ),
)
if hasattr(c10d, "_create_gloo_process_group"):  # older torch has no function for it
    _FOR_GLOO += (
        Replacement(
            "torch.distributed.distributed_c10d._create_gloo_process_group",
            create_on_one_device,
            "some twenty groups, each with a thread that wakes up over and over, parallel_state.py:259",
        ),
    )

# Nothing fails without these: gradients are too small where a token is frequent in a microbatch.
_FOR_SUMS = (
    Replacement(
        "torch.nn.functional.embedding",
        embedding_with_wide_sums,
        "called for word embeddings, tensor_parallel/layers.py:356",
    ),
    Replacement("torch.nn.functional.layer_norm", layer_norm_with_wide_sums, "a GPU adds in fp32, as ours must"),
)

REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement("torch.cuda.current_device", _returns(0), "asked for on every allocation, tensor_parallel/mappings.py"),
    Replacement("torch.cuda.synchronize", _returns(None), "after batched sends, p2p_communication.py:419"),
    Replacement(
        "torch.cuda.current_stream", lambda _original: _NullStream, "gradient reduction, param_and_grad_buffer.py:632"
    ),
    Replacement(
        "torch.cuda.Stream",
        lambda _original: _NullStream,  # a class as it is: other libraries name it in their annotations
        "to reduce across optimizer instances, distributed_data_parallel.py:297",
    ),
    Replacement(
        "torch.distributed.device_mesh.DeviceMesh.from_group",
        _mesh_of_cpus,
        'device_type="cuda" in distributed/fsdp/mcore_fsdp_adapter.py:440',
    ),
    Replacement(
        "torch.cuda.manual_seed", lambda _original: torch.manual_seed, "the RNG tracker, tensor_parallel/random.py:305"
    ),
    Replacement(
        "torch.cuda.get_rng_state",
        lambda _original: lambda *_args, **_kwargs: torch.get_rng_state(),
        "the RNG tracker, tensor_parallel/random.py:303",
    ),
    Replacement(
        "torch.cuda.random.get_rng_state",
        lambda _original: lambda *_args, **_kwargs: torch.get_rng_state(),
        "the RNG tracker, tensor_parallel/random.py:118",
    ),
    Replacement(
        "torch.cuda.default_generators",
        lambda _original: (torch.default_generator,),
        "the RNG tracker sets its state, tensor_parallel/random.py:166",
    ),
    Replacement("torch.cuda._lazy_call", _call_now, "no CUDA start to wait for, tensor_parallel/random.py:174"),
    Replacement("torch.Tensor.cuda", lambda _original: lambda self, *_a, **_k: self, "optimizer/grad_scaler.py:163"),
    Replacement("torch.Tensor.type", _type_as_on_cuda, "type names are compared, optimizer/distrib_optimizer.py:401"),
    Replacement("torch.tensor", _made_on_cpu, 'device="cuda" in optimizer/optimizer.py:690'),
    Replacement("torch.zeros", _made_on_cpu, 'device="cuda" in pipeline_parallel/schedules.py:749'),
    Replacement("torch.empty", _made_on_cpu, "device=current_device() in tensor_parallel/mappings.py:95"),
    *_FOR_EXPERTS,
)


def adapt(without: Iterable[str] = ()) -> None:
    """Install every replacement but those named in `without` (which only the table's own test uses)."""
    delay_compiler(_originals)
    # torch lists the functions that `with torch.device(...)` concerns at their first use, and must not list ours: a
    # model made on "meta" would take memory.
    with torch.device("cpu"):
        torch.empty(0)
    left_out = set(without)
    for row in (*REPLACEMENTS, *_FOR_GLOO, *_FOR_SUMS):
        if row.name not in left_out:
            owner_path, attribute = row.name.rsplit(".", 1)
            owner = _resolve(owner_path)
            original = getattr(owner, attribute)
            _replaced.append((owner, attribute, original))
            setattr(owner, attribute, row.make(original))


_replaced: list[tuple[Any, str, Any]] = []
"""Owner, attribute and original object of each replacement that is installed, in this order."""


@contextlib.contextmanager
def _originals() -> Iterator[None]:
    """Return a context with the original objects in their places: torch's compiler looks at them when imported."""
    ours = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in _replaced]
    try:
        for owner, attribute, original in reversed(_replaced):
            setattr(owner, attribute, original)
        yield
    finally:
        for owner, attribute, replacement in ours:
            setattr(owner, attribute, replacement)


def _resolve(path: str) -> Any:
    """Return the module or class at a dotted path."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(path)
    module, name = path.rsplit(".", 1)
    return getattr(_resolve(module), name)
