"""What stands in for CUDA and for gloo in a CPU process, one function at a time, on stand-ins for what it calls.
tests/distributed/test_adaptation.py shows that each row is needed."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_ext import device
from megatron_ext.device import adaptation, cuda, external_kernels
from megatron_ext.device.adaptation import (
    _gathers_unequal_parts,
    _made_on_cpu,
    _mesh_of_cpus,
    _names_cuda,
    _nothing_alone,
    _splits_as_numbers,
    _type_as_on_cuda,
)
from megatron_ext.errors import ConfigurationError


@pytest.mark.parametrize(
    ("named", "is_cuda"),
    [
        ("cuda", True),
        ("cuda:1", True),
        (torch.device("cuda", 1), True),
        (0, True),
        (3, True),
        ("cpu", False),
        ("meta", False),
    ],
)
def test_what_names_a_gpu_is_made_on_the_cpu(named: Any, is_cuda: bool) -> None:
    assert _names_cuda(named) == is_cuda
    made: list[Any] = []

    def factory(*given: Any, **named: Any) -> torch.Tensor:
        made.append((given, named))
        return torch.zeros(1)

    _made_on_cpu(factory)(2, 3, device=named, dtype=torch.int8)
    _made_on_cpu(factory)(4)
    assert made == [((2, 3), {"device": "cpu" if is_cuda else named, "dtype": torch.int8}), ((4,), {})]


def test_types_have_the_names_that_the_engine_compares() -> None:
    answers = iter(["torch.FloatTensor", "torch.cuda.HalfTensor", torch.ones(1)])
    type_ = _type_as_on_cuda(lambda *_given: next(answers))
    assert [type_(None), type_(None)] == ["torch.cuda.FloatTensor", "torch.cuda.HalfTensor"]
    assert type_(None, torch.float32).tolist() == [1.0]


def test_sizes_of_parts_are_numbers() -> None:
    seen: list[Any] = []
    exchange = _splits_as_numbers(lambda *given, **named: seen.append((given, named)))
    exchange("out", "in", output_split_sizes=torch.tensor([1, 2]), input_split_sizes=torch.tensor([3]), group="ranks")
    exchange("out", "in", output_split_sizes=[1], input_split_sizes=None)
    assert seen == [
        (("out", "in"), {"output_split_sizes": [1, 2], "input_split_sizes": [3], "group": "ranks"}),
        (("out", "in"), {"output_split_sizes": [1], "input_split_sizes": None}),
    ]


@pytest.mark.parametrize("sizes", [(1, 3, 0), (2, 2, 2)])
def test_parts_of_unequal_sizes_are_gathered_from_their_beginnings(sizes: tuple[int, ...]) -> None:
    """In the group that is named, by parts of one size."""
    whole = [torch.arange(2.0 * size).view(size, 2) + 10 * rank for rank, size in enumerate(sizes)]
    asked: list[Any] = []

    def gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None, **named: Any) -> str:
        asked.append((group, {len(part) for part in (*parts, own)}, own[: sizes[0]].tolist(), named))
        for part, given in zip(parts, whole, strict=True):
            part.fill_(-1.0)
            part[: len(given)] = given
        return "work"

    parts = [torch.full((size, 2), torch.nan) for size in sizes]
    result = _gathers_unequal_parts(gather)(parts, whole[0], group="ranks", async_op=len(set(sizes)) == 1)
    assert all(map(torch.equal, parts, whole))
    equal = len(set(sizes)) == 1
    named = {"async_op": True} if equal else {}
    assert asked == [("ranks", {max(sizes)}, whole[0].tolist(), named)]
    assert result == ("work" if equal else None)


def test_meshes_are_of_cpus() -> None:
    seen: list[Any] = []
    _mesh_of_cpus(lambda *given, **named: seen.append((given, named)))("group", "cuda", "mesh", names=("dp",))
    assert seen == [(("group", "cpu", "mesh"), {"names": ("dp",)})]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_rank_alone_sends_nothing(asynchronous: bool) -> None:
    """Who asks for the work to wait for gets it."""
    alone: Any = torch.distributed.ProcessGroup(0, 1)
    two: Any = torch.distributed.ProcessGroup(0, 2)
    sent: list[Any] = []
    reduce = _nothing_alone(lambda _tensor, **named: sent.append(named["group"]))
    for group in (alone, two, None):
        reduce(torch.ones(1), group=group, async_op=asynchronous)
    assert sent == ([alone, two, None] if asynchronous else [two, None])


def test_every_row_says_why() -> None:
    rows = (*adaptation.REPLACEMENTS, *adaptation._FOR_GLOO, *adaptation._FOR_SUMS)
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.why for row in rows)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_of_a_machine_warns(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(external_kernels, "missing_for_kernels", lambda: "there is none")
    assert not device._can_fuse(rank)
    assert ("--disable-jit-fuser" in capsys.readouterr().err) == (rank == 0)


@pytest.mark.parametrize(
    ("found", "compiler", "missing"),
    [
        (("gcc",), None, None),
        (("clang",), None, None),
        ((), "/opt/cc", None),
        (("c++",), None, "there is no C compiler (gcc or clang)"),
    ],
)
def test_any_c_compiler_will_do(
    found: tuple[str, ...], compiler: str | None, missing: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(external_kernels.importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(external_kernels.shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(external_kernels.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    assert external_kernels.missing_for_kernels() == missing
    (tmp_path / "Python.h").unlink()
    assert external_kernels.missing_for_kernels() == (
        missing or "Python's header files are not installed (python3-dev)"
    )
    monkeypatch.setattr(external_kernels.importlib.util, "find_spec", lambda _name: None)
    assert external_kernels.missing_for_kernels() == "Triton is not installed"


def test_the_compiler_is_as_it_was() -> None:
    genuine = torch.compile
    external_kernels.leave_uncompiled()
    assert torch.compile is genuine


@pytest.mark.parametrize(
    ("imported", "installed", "asked", "used", "left"),
    [
        ((), (), (), [], []),
        ((), ("apex",), (), [], ["apex"]),
        ((), ("apex",), ("apex",), ["apex"], []),
        ((), (), ("apex",), [], []),
        (("transformer_engine",), ("apex",), ("apex",), ["apex", "transformer_engine"], []),
        ((), ("apex", "transformer_engine"), ("transformer_engine",), ["transformer_engine"], ["apex"]),
        ((), ("apex", "transformer_engine"), (), [], ["apex", "transformer_engine"]),
    ],
)
def test_packages_that_nobody_asked_for_are_as_if_they_were_not_there(
    imported: tuple[str, ...],
    installed: tuple[str, ...],
    asked: tuple[str, ...],
    used: list[str],
    left: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are not installed too; one that is imported already stays."""
    modules: dict[str, Any] = {name: object() for name in imported}
    monkeypatch.setattr(external_kernels.sys, "modules", modules)
    monkeypatch.setattr(external_kernels, "_used", [])
    monkeypatch.setattr(external_kernels, "_left_out", [])
    monkeypatch.setattr(
        external_kernels.importlib.util, "find_spec", lambda name: object() if name in installed else None
    )
    external_kernels.leave_out(asked)
    assert (external_kernels._used, external_kernels._left_out) == (used, left)
    hidden = {name for name, module in modules.items() if module is None}
    kept = {*imported, *asked}
    expected = {name for package, names in external_kernels._MODULES.items() if package not in kept for name in names}
    assert hidden == expected
    text = external_kernels.kernels_text()
    titles = {"apex": "apex", "transformer_engine": "Transformer Engine"}
    if used:
        assert text == f"Adam, norm and clipping are {' and '.join(titles[name] for name in used)}'s, where it has them"
    elif not left:
        assert text is None
    else:
        verb = "is" if len(left) == 1 else "are"
        flags = " or ".join(f"--external-kernels {name}" for name in left)
        assert text == (
            f"Adam, norm and clipping are torch's; {' and '.join(titles[name] for name in left)} {verb} installed and "
            f"not used ({flags} takes it)"
        )


def test_a_process_has_one_device() -> None:
    here = device.current()
    assert device.install("cpu") is device.install("auto") is here
    with pytest.raises(RuntimeError, match="device 'cpu' is installed; it cannot become 'cuda'"):
        device.install("cuda")


@pytest.mark.parametrize(("rank", "seen"), [("2", 2), ("0", 0)])
def test_a_local_rank_without_a_gpu_is_told_so(rank: str, seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_current", None)
    monkeypatch.setattr(device.sys, "modules", {"torch": torch, cuda.__name__: cuda})  # as before the engine's import
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    with pytest.raises(ConfigurationError, match=f"local rank {rank} needs GPU {rank}, but torch sees {seen}"):
        device.install("cuda")


DEVICES = """
import torch
from megatron_ext import device
device.install("cpu")
with torch.device("meta"):
    made = [torch.empty(2), torch.zeros(2), torch.tensor(1.0), torch.ones(2), torch.nn.Linear(2, 2).weight]
print(*(each.device for each in made))
"""


def test_a_context_of_another_device_holds_for_what_is_replaced() -> None:
    """In an interpreter that has made no such context before, as transformers does for each model that it loads."""
    done = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["meta"] * 5
