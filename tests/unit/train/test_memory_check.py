"""Whether a run fits into the memory of its machine, and what is said where it does not: with sizes made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import Config
from megatron_ext.device.protocol import DeviceMemory
from megatron_ext.errors import ConfigurationError, DataError, MemoryExhaustedError, TrainingError
from megatron_ext.train import memory_check
from megatron_ext.train.memory_check import as_exhausted, check_it_fits, is_exhausted, telling_of_memory
from tests.support.small_models import small_config

GB = 1e9


def _machine(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    *,
    kept: float = 0.0,
    needed: float = 0.0,
    in_host: float = 0.0,
    total: float = 100.0,
    free: float = 100.0,
    host: float = 100.0,
    swap: float = 0.0,
    local: tuple[int, int] = (0, 1),
) -> tuple[Any, list[Any]]:
    """A device, all in GB, and what the formulas are asked."""
    asked: list[Any] = []

    def told(name: str, result: Any) -> None:
        monkeypatch.setattr(memory_check, name, lambda config, **named: asked.append((name, named)) or result)

    told("kept_at_least", (1, {"weights": kept * GB, "gradients": 0.0}))
    told("estimate", (2, SimpleNamespace(total=needed * GB, parts={"activations": needed * GB})))
    told("host_bytes", in_host * GB)
    monkeypatch.setattr(memory_check, "helpful_flags", lambda config, needed, *, fused: [f"--help-{fused}", "--more"])
    monkeypatch.setattr(memory_check, "host_memory", lambda: (host * GB, 0.0))
    monkeypatch.setattr(memory_check, "host_swap", lambda: swap * GB)
    for name, number in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local, strict=True):
        monkeypatch.setenv(name, str(number))
    monkeypatch.setenv("RANK", "5")
    device = SimpleNamespace(
        kind=kind,
        torch_device=SimpleNamespace(index=3),
        capacity=lambda: (total * GB, free * GB),
        memory=lambda: DeviceMemory(int(11 * GB), int(12 * GB), int(13 * GB)),
    )
    return device, asked


@pytest.mark.parametrize(
    ("kind", "sizes", "fits"),
    [
        ("cpu", {"kept": 50.0, "local": (0, 2)}, True),
        ("cpu", {"kept": 50.1, "local": (0, 2)}, False),
        ("cpu", {"kept": 60.0, "local": (0, 2), "swap": 20.0}, True),
        ("cpu", {"kept": 60.1, "local": (0, 2), "swap": 20.0}, False),
        ("cuda", {"kept": 100.0, "local": (0, 2)}, True),
        ("cuda", {"kept": 100.1, "local": (0, 2)}, False),
        ("cuda", {"kept": 100.1, "swap": 20.0}, False),
        ("cuda", {"kept": 10.0, "in_host": 50.0, "local": (0, 2)}, True),
        ("cuda", {"kept": 10.0, "in_host": 50.1, "local": (0, 2)}, False),
        ("cuda", {"kept": 10.0, "in_host": 60.0, "local": (0, 2), "swap": 20.0}, True),
        ("cuda", {"kept": 10.0, "in_host": 60.1, "local": (0, 2), "swap": 20.0}, False),
        ("cpu", {"in_host": 1000.0}, True),
    ],
)
def test_what_is_kept_between_steps_must_fit(
    kind: str, sizes: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a machine share its memory, and swap; each has a GPU of its own, and together the host's."""
    device, asked = _machine(monkeypatch, kind, **sizes)
    if fits:
        check_it_fits(small_config(), device)
    else:
        with pytest.raises(ConfigurationError):
            check_it_fits(small_config(), device)
    on_cpu = kind == "cpu"
    assert asked[0] == ("kept_at_least", {"fused": not on_cpu, "anywhere": on_cpu})
    assert all(named["fused"] is (not on_cpu) for name, named in asked if name == "estimate")


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        (
            "cpu",
            {"kept": 60.0, "local": (0, 2), "total": 90.0},
            "2 x a rank needs 60.0 GB between steps (weights 60.0 GB), but this machine has 90.0 GB of memory; "
            "use --help-False; or --more",
        ),
        (
            "cuda",
            {"kept": 95.0, "total": 90.0},
            "a rank needs 95.0 GB between steps (weights 95.0 GB), but GPU 3 has 90.0 GB of memory; "
            "use --help-True; or --more",
        ),
        (
            "cuda",
            {"in_host": 60.0, "host": 110.0, "local": (0, 2)},
            "2 ranks keep 120.0 GB in host memory, but this machine has 110.0 GB; use a smaller "
            "--optimizer-offload-fraction, or more machines",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_its_numbers(
    kind: str, sizes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, _ = _machine(monkeypatch, kind, **sizes)
    with pytest.raises(ConfigurationError) as raised:
        check_it_fits(small_config(), device)
    assert str(raised.value) == words


@pytest.mark.parametrize(
    ("kind", "sizes", "who"),
    [
        ("cpu", {"needed": 45.0, "local": (0, 2)}, None),
        ("cpu", {"needed": 45.1, "local": (0, 2)}, "2 x a rank"),
        ("cpu", {"needed": 45.1, "local": (1, 2)}, None),
        ("cuda", {"needed": 90.0, "local": (0, 2)}, None),
        ("cuda", {"needed": 90.1, "local": (0, 2)}, "a rank"),
        ("cuda", {"needed": 46.0, "free": 50.0}, "a rank"),
        ("cuda", {"needed": 91.0, "free": 50.0, "local": (1, 2)}, None),
    ],
)
def test_one_rank_of_each_machine_warns_where_it_comes_near(
    kind: str,
    sizes: dict[str, Any],
    who: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To nine tenths of what is free, which is less than there is."""
    device, _ = _machine(monkeypatch, kind, **sizes)
    check_it_fits(small_config(), device)
    said = capsys.readouterr().err
    if who is None:
        assert said == ""
        return
    what, fused = ("this machine", False) if kind == "cpu" else ("GPU 3", True)
    needed, free = sizes["needed"], sizes.get("free", 100.0)
    assert said == (
        f"warning: {who} needs about {needed} GB (activations {needed} GB), and {what} has {free} GB of memory free: "
        f"it may run out. What helps: --help-{fused}; or --more\n"
    )


@pytest.mark.parametrize(("stages", "who"), [(1, "a rank needs"), (2, "a rank of pipeline stage 1 needs")])
def test_the_stage_is_named_where_there_are_several(stages: int, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = _machine(monkeypatch, "cuda", kept=200.0)
    config = small_config(layout={"pipeline_model_parallel_size": stages, "world_size": stages})
    with pytest.raises(ConfigurationError, match=f"^{who} 200"):
        check_it_fits(config, device)


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA"), True),
        (RuntimeError("CUDA out of memory. Tried"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("Cannot allocate memory"), True),
        (RuntimeError("NCCL Error 1: Out Of Memory"), True),
        (RuntimeError("shape '[2]' is invalid"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_errors_say_that_memory_has_run_out(error: BaseException, exhausted: bool) -> None:
    assert is_exhausted(error) is exhausted


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_held_how_much_is_told(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = _machine(monkeypatch, kind, needed=42.0)
    found = as_exhausted(RuntimeError("CUDA out of memory.  Tried\nto. GPU 0 has. x"), small_config(), device)
    fused = kind == "cuda"
    assert str(found) == (
        "memory has run out (CUDA out of memory). This rank held 11.0 GB, at most 12.0 GB; by formula a rank of stage "
        f"2, which needs most, has 42.0 GB: activations 42.0 GB. What helps: --help-{fused}; or --more"
    )
    assert {named["fused"] for _, named in asked} == {fused}
    assert as_exhausted(ValueError("else"), small_config(), device) is None


class _OwnError(Exception):
    """Another error."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("all of it"), MemoryExhaustedError),
        (_OwnError("else"), _OwnError),
        (DataError("out of memory"), DataError),
        (TrainingError("out of memory"), TrainingError),
    ],
)
def test_only_an_error_of_memory_is_told_in_other_words(
    error: Exception, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours have said what they say."""
    device, _ = _machine(monkeypatch, "cuda")
    config: Config = small_config()
    monkeypatch.setattr(memory_check, "is_exhausted", lambda error: not isinstance(error, _OwnError))
    with pytest.raises(told) as raised, telling_of_memory(config, device):
        raise error
    if told is MemoryExhaustedError:
        assert raised.value.__cause__ is error
    else:
        assert raised.value is error
