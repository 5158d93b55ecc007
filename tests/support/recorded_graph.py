"""Stands in for a CUDA graph where there is no GPU: what was called is written down, and a replay calls it again.

As with a GPU's graph

- a capture changes nothing: whatever it wrote into tensors from outside is put back when it ends;
- a replay runs no Python of what was captured, but its operators alone, in their order, on the same tensors: those made
  in the capture keep their memory, and whatever was a number then is the same number;
- reading a number (`item`, `float`, `bool`) in a capture is an error.

Collectives, of which operators show nothing on a CPU, are written down at the methods of torch's process groups.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from megatron.core import full_cuda_graph
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.parallel.operations import COLLECTIVES, WrappedMethods

_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")


class RecordedGraph:
    """Stands in for torch.cuda.CUDAGraph."""

    made: ClassVar[list["RecordedGraph"]] = []

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.names: list[str] = []
        self.read_from_outside: dict[int, torch.Tensor] = {}
        """Tensors that were not made in the capture, by their memory: a graph needs them where they are."""

        self.replays = 0
        RecordedGraph.made.append(self)

    def register_generator_state(self, state: torch.Generator) -> None:
        assert isinstance(state, torch.Generator), "torch takes no other"

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for call in self.calls:
                call()


@contextlib.contextmanager
def capture(graph: RecordedGraph, **_options: Any) -> Iterator[None]:
    """Stands in for torch.cuda.graph."""
    recorder = _Recorder(graph)
    methods = WrappedMethods()
    for name in COLLECTIVES:
        methods.wrap(ProcessGroup, name, recorder.collective)
    try:
        with recorder:
            yield
    finally:
        methods.put_back()
        recorder.undo()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph):
        super().__init__()
        self._graph = graph
        self._made: dict[int, torch.Tensor] = {}  # by the address of their memory; kept, so that none is used twice
        self._before: dict[int, tuple[Any, Any]] = {}  # storages, and copies of them
        self._silent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent:
            return func(*args, **kwargs)
        name = func._schema.name
        if name in _READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name == "aten::lift_fresh":  # what torch.tensor has just made of numbers
            self._made.update((_place(tensor), tensor) for tensor in given)
        for tensor in given:
            self._see(tensor)
        written = _written(func, args, kwargs)
        for tensor in written:
            self._remember(tensor)
        returned = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        places = {_place(tensor) for tensor in given}
        new = [tensor for tensor in results if _place(tensor) not in places]
        for tensor in new:
            self._made[_place(tensor)] = tensor
        if new or written:
            self._graph.names.append(name)
            self._graph.calls.append(lambda: _again(func, args, kwargs, [one.detach() for one in new]))
        return returned

    def collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self._silent:  # gloo makes one collective of others, on copies
                return original(group, *args, **kwargs)
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            for tensor in given:
                self._see(tensor)
                self._remember(tensor)
            self._silent = True
            try:
                work = original(group, *args, **kwargs)
                if work is not None:
                    work.wait()
            finally:
                self._silent = False

            def again() -> None:
                done = original(group, *args, **kwargs)
                if done is not None:
                    done.wait()

            self._graph.names.append(original.__name__)
            self._graph.calls.append(again)
            return work

        return call

    def undo(self) -> None:
        """Put back what the capture has written: a GPU's captures nothing but writes down."""
        for storage, before in self._before.values():
            storage.copy_(before)

    def _see(self, tensor: torch.Tensor) -> None:
        if _place(tensor) not in self._made and tensor.numel():
            self._graph.read_from_outside[_place(tensor)] = tensor

    def _remember(self, tensor: torch.Tensor) -> None:
        place = _place(tensor)
        if place not in self._made and place not in self._before and tensor.numel():
            storage = tensor.untyped_storage()
            self._before[place] = storage, storage.clone()


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments that an operator writes into."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _again(func: Any, args: Any, kwargs: Any, into: list[torch.Tensor]) -> None:
    """Call an operator once more, and leave what it returns where its result was."""
    returned = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    if into:
        assert len(returned) == len(into)
        for place, value in zip(into, returned, strict=True):
            place.copy_(value)


@contextlib.contextmanager
def recorded_graphs() -> Iterator[list[RecordedGraph]]:
    """A context in which megatron-core captures graphs of this kind; gives those that were made."""
    RecordedGraph.made = made = []
    stands_in = {
        "CUDAGraph": RecordedGraph,
        "graph": capture,
        "graph_pool_handle": object,
        "stream": lambda _stream: contextlib.nullcontext(),
    }
    before = {name: getattr(torch.cuda, name) for name in stands_in}
    for name, stand_in in stands_in.items():
        setattr(torch.cuda, name, stand_in)
    full_cuda_graph._shared_capture_stream = None
    try:
        yield made
    finally:
        for name, original in before.items():
            setattr(torch.cuda, name, original)
