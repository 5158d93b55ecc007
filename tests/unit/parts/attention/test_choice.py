"""Which of torch's kernels of attention a process uses. A CPU has two: FlashAttention's and the written-out one."""

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from torch.nn import attention

from megatron_ext import device
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.model.config import transformer_config
from megatron_ext.model.gpt import GPT
from megatron_ext.parts.attention import choice as attention_kernel
from megatron_ext.parts.attention.choice import (
    KERNELS,
    Heads,
    Kernel,
    allowed_kernels,
    choose,
    is_installed,
    seconds,
    use,
)
from megatron_ext.train.configure import configure
from tests.support.operator_calls import Calls, aten
from tests.support.small_models import small_config

HEADS = Heads(batch=2, queries=4, groups=2, length=8, channels=16, dtype=torch.float32)
FUSED, FLASH, FLASH_3, UNFUSED = Kernel("fused"), Kernel("flash"), Kernel("flash", 3), Kernel("unfused")
GPU: Any = SimpleNamespace(kind="cuda", model_name="NVIDIA H200")


@pytest.fixture(autouse=True)
def left_to_torch() -> Iterator[None]:
    yield
    use(None, device.current())


def called() -> set[Any]:
    """The operators that attention calls."""
    heads = torch.ones(1, 2, 4, 8)
    with Calls() as calls:
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return {operator for operator, _, _ in calls.calls}


def test_a_process_uses_what_it_is_told() -> None:
    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert fused in called()
    use(UNFUSED, device.current())
    assert fused not in called()
    use(FUSED, device.current())
    assert fused in called(), "a CPU keeps the only fused kernel that it has"
    use(UNFUSED, device.current())
    use(None, device.current())
    assert fused in called()


def test_on_a_gpu_the_kernel_comes_first_and_others_take_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    @contextlib.contextmanager
    def sdpa_kernel(backends: Any, set_priority: bool = False) -> Iterator[None]:
        held.append((backends, set_priority))
        yield
        held.pop()

    monkeypatch.setattr(attention_kernel, "sdpa_kernel", sdpa_kernel)
    use(FUSED, GPU)
    [(backends, in_this_order)] = held
    assert in_this_order
    assert [backend.name for backend in backends] == [
        "CUDNN_ATTENTION",
        "FLASH_ATTENTION",
        "EFFICIENT_ATTENTION",
        "MATH",
    ]
    use(UNFUSED, GPU)
    assert [backend.name for backend in held[0][0]] == ["MATH"]
    use(None, GPU)
    assert not held


def test_another_version_takes_the_place_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    active: list[str] = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", active.clear)
    use(FLASH_3, GPU)
    assert active == ["FA3"]
    use(FLASH, GPU)
    assert not active


def test_what_cannot_run_takes_no_time() -> None:
    here = device.current()
    assert seconds(FUSED, HEADS, here) is None, "a CPU has no cuDNN"
    for kernel in (FLASH, UNFUSED):
        taken = seconds(kernel, HEADS, here)
        assert taken is not None
        assert taken > 0.0
    assert not torch.are_deterministic_algorithms_enabled()


def test_only_what_varies_in_no_run_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        attention_kernel, "_measured", lambda heads, here: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    seconds(FLASH, HEADS, device.current())
    seconds(FLASH, replace(HEADS, deterministic=True), device.current())
    assert seen == [False, True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_flags_leave_these_kernels() -> None:
    def left(**flags: Any) -> tuple[Kernel, ...]:
        return allowed_kernels(small_config(training=flags))

    assert left() == left(attention_backend="local") == KERNELS
    assert left(attention_backend="flash") == (FLASH, FLASH_3, Kernel("flash", 4))
    assert left(attention_backend="flash", flash_attention_version=2) == (FLASH,)
    assert left(flash_attention_version=3) == (FLASH_3,)
    assert left(attention_backend="fused") == left(attention_backend="fused", flash_attention_version=3) == (FUSED,)
    assert left(attention_backend="unfused") == (UNFUSED,)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[Kernel, float]:
    """Seconds of the kernels of a GPU; one that is missing cannot run. Rank 0's are all ranks'."""
    found = {FUSED: 0.002, FLASH: 0.003}
    monkeypatch.setattr(attention_kernel, "seconds", lambda kernel, heads, here: found.get(kernel))
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda objects, src: None)
    return found


def bf16(**flags: Any) -> Config:
    return small_config(training={"bf16": True, **flags})


def settled(config: Config) -> tuple[str, int | None]:
    return config.training.attention_backend, config.training.flash_attention_version


def test_the_fastest_is_taken_and_said(times: dict[Kernel, float]) -> None:
    choice = choose(bf16(), GPU, None)
    assert settled(choice.config) == ("fused", None)
    assert choice.text == "fused; forward and backward pass of a layer: fused 2.00 ms, flash 2 3.00 ms"
    times[FLASH_3] = 0.001
    choice = choose(bf16(), GPU, None)
    assert settled(choice.config) == ("flash", 3)
    assert allowed_kernels(choice.config) == (FLASH_3,)


def test_rank_0s_fastest_is_everybodys(times: dict[Kernel, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def from_rank_0(objects: list[Any], src: int) -> None:
        assert src == 0
        objects[:] = [[(0.001, FLASH), (0.004, FUSED)]]

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", from_rank_0)
    assert settled(choose(bf16(), GPU, None).config) == ("flash", 2)


def test_a_resumed_run_keeps_its_kernel(times: dict[Kernel, float]) -> None:
    def resumed(backend: str, version: int | None = None, **flags: Any) -> tuple[str, int | None]:
        saved = {"attention_backend": backend, "flash_attention_version": version}
        return settled(choose(bf16(**flags), GPU, saved).config)

    assert resumed("flash", 2) == ("flash", 2)
    assert resumed("auto") == ("fused", None), "saved before there was a choice, or on a CPU"
    assert resumed("flash", 3) == ("fused", None), "its package is gone"
    assert resumed("flash", 2, attention_backend="fused") == ("fused", None), "the flag is stronger"
    assert settled(choose(bf16(), GPU, None).config) == ("fused", None)
    times[FLASH] = 0.001
    assert resumed("fused") == ("fused", None), "another would round differently"
    assert settled(choose(bf16(), GPU, None).config) == ("flash", 2)


@pytest.mark.parametrize("runs_on_rank_0", [True, False])
def test_rank_0_says_whether_a_resumed_run_keeps_its_kernel(
    runs_on_rank_0: bool, times: dict[Kernel, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the ranks that measure wait for those that have gone on."""
    if runs_on_rank_0:
        del times[FLASH]  # on this rank, whose GPU has no memory left for it

    def from_rank_0(objects: list[Any], src: int) -> None:
        asked.append(objects[0])
        of_rank_0: list[Any] = [0.003 if runs_on_rank_0 else None, [(0.002, FUSED)]]
        objects[0] = of_rank_0[len(asked) - 1]

    asked: list[Any] = []
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", from_rank_0)
    saved = {"attention_backend": "flash", "flash_attention_version": 2}
    found = settled(choose(bf16(), GPU, saved).config)
    assert found == (("flash", 2) if runs_on_rank_0 else ("fused", None))
    assert asked[0] == (None if runs_on_rank_0 else 0.003)


def test_a_kernel_that_cannot_run_is_refused(times: dict[Kernel, float], monkeypatch: pytest.MonkeyPatch) -> None:
    del times[FUSED]
    with pytest.raises(ConfigurationError, match=r"--attention-backend fused: NVIDIA H200 cannot run it for 4 heads"):
        choose(bf16(attention_backend="fused"), GPU, None)
    monkeypatch.setattr(attention_kernel, "is_installed", lambda kernel: kernel.version == 2)
    wanted = {"attention_backend": "flash", "flash_attention_version": 4}
    with pytest.raises(ConfigurationError, match=r"--flash-attention-version 4: torch finds no package of it here"):
        choose(bf16(**wanted), GPU, None)
    with pytest.raises(ConfigurationError, match=r"auto --flash-attention-version 4: torch finds no package"):
        choose(bf16(flash_attention_version=4), GPU, None)
    del times[FLASH]
    with pytest.raises(ConfigurationError, match=r"--attention-backend flash: NVIDIA H200 cannot run it"):
        choose(bf16(attention_backend="flash"), GPU, None)  # of its three packages one is there
    left = choose(bf16(), GPU, None)
    assert settled(left.config) == ("auto", None)
    assert left.text == "torch's choice: no fused kernel takes these heads"


def test_nothing_to_choose() -> None:
    cpu = SimpleNamespace(kind="cpu")
    documents = replace(bf16(), data=replace(bf16().data, reset_attention_mask=True))
    ring = small_config(layout={"context_parallel_size": 2, "world_size": 2})
    for here, config in ((cpu, bf16()), (GPU, documents), (GPU, ring)):
        assert choose(config, here, None) == attention_kernel.Choice(config)  # pyright: ignore[reportArgumentType]


def test_what_heads_a_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Heads] = []
    monkeypatch.setattr(attention_kernel, "seconds", lambda kernel, heads, here: asked.append(heads) or 1.0)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda objects, src: None)
    config = small_config(
        layout={"tensor_model_parallel_size": 2, "world_size": 2},
        model={"num_query_groups": 2, "group_query_attention": True},
        training={"bf16": True, "deterministic_mode": True},
    )
    choose(config, GPU, None)
    model = config.model
    assert asked[0] == Heads(
        batch=config.training.micro_batch_size,
        queries=model.num_attention_heads // 2,
        groups=1,
        length=model.seq_length,
        channels=model.kv_channels,
        dtype=torch.bfloat16,
        dropout=model.attention_dropout,
        deterministic=True,
    )


def test_heads_are_those_of_ranks_that_exchange_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a2a each context-parallel rank has whole samples and a part of the heads; the wider of keys and values
    counts."""
    described = attention_kernel.layers(small_config({"attention_dropout": 0.125, "hidden_dropout": 0.5}))
    wider = replace(described[0], mixer=replace(described[0].attention, value_head_size=24))
    for kinds, channels in ((described, 16), ([wider], 24)):
        monkeypatch.setattr(attention_kernel, "layers", lambda config, kinds=kinds: kinds)
        layout = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "cp_comm_type": ("a2a",)}
        config = small_config({"attention_dropout": 0.125, "hidden_dropout": 0.5}, layout={**layout, "world_size": 4})
        heads = attention_kernel._heads(config)
        assert heads == Heads(2, 1, 1, 16, channels, torch.float32, 0.125)


class _Clock:
    """Stands for a device: each pass takes as many seconds as its number, once all have been waited for."""

    kind, torch_device = "cpu", torch.device("cpu")

    def __init__(self) -> None:
        self.marks, self.waited = 0, False

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def synchronize(self) -> None:
        self.waited = True

    def seconds_between(self, first: int, last: int) -> float:
        assert self.waited, "the device is not there yet"
        assert last == first + 1
        return float(last**2)


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of causal attention with the rank's own heads; the first passes do not count."""
    made: list[tuple[Any, ...]] = []
    genuine: Any = F.scaled_dot_product_attention

    def attend(*heads: torch.Tensor, **named: Any) -> torch.Tensor:
        made.append(([tuple(one.shape) for one in heads], {one.dtype for one in heads}, named))
        assert all(one.requires_grad for one in heads)
        return genuine(*heads, **named)

    graded: list[int] = []
    differentiate = torch.autograd.grad
    monkeypatch.setattr(attention_kernel.F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(
        torch.autograd, "grad", lambda out, of, gradient: graded.append(len(of)) or differentiate(out, of, gradient)
    )
    clock: Any = _Clock()
    heads = replace(HEADS, dropout=0.25, dtype=torch.float64)
    # Thirteen passes; the squares of 8, 10, ..., 26, whose median is between those of 16 and 18.
    assert attention_kernel._measured(heads, clock) == (16**2 + 18**2) / 2
    assert graded == [3] * 13
    named = {"dropout_p": 0.25, "is_causal": True, "enable_gqa": True}
    assert made == [([(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)], {torch.float64}, named)] * 13
    attention_kernel._measured(replace(HEADS, groups=4), clock)
    assert made[-1][2]["enable_gqa"] is False


def test_a_package_must_be_known_to_torch_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, found, expected in ((["FA3"], True, True), (["FA4"], True, False), (["FA3"], False, False)):
        monkeypatch.setattr(attention, "list_flash_attention_impls", lambda known=known: known, raising=False)
        monkeypatch.setattr(attention_kernel, "_is_found", lambda package, found=found: found)
        assert is_installed(FLASH_3) == expected

    def raises(package: str) -> None:
        raise ImportError(package)

    monkeypatch.undo()
    monkeypatch.setattr(attention_kernel.importlib.util, "find_spec", raises)
    assert not attention_kernel._is_found("flash_attn.cute"), "its parent cannot be imported"
    assert is_installed(FLASH)
    assert is_installed(FUSED)


CONTEXT = "--world-size 2 --context-parallel-size 2"
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 9 --mock-data --vocab-size 100 --dry-run"
)


def named_kernel(line: str) -> tuple[str, int | None, list[str]]:
    """The flags of a kernel that are left of those of FlashAttention 3, and what is said of them."""
    words = shlex.split(f"{MODEL} --attention-backend flash --flash-attention-version 3 {line}")
    found = configure(words, believing=True)
    named = ("--attention-backend ", "--flash-attention-version ")
    said = [warning for warning in found.typed.warnings if warning.startswith(named)]
    return *settled(found.config), said


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--device cpu", "with --device cpu torch has one fused kernel of attention"),
        ("--device cpu --reset-attention-mask --attention-dropout 0 --attention-backend unfused", "for documents"),
        ("--device cuda --reset-attention-mask --attention-dropout 0", "kernel for documents"),
        (f"--device cuda {CONTEXT} --attention-dropout 0", "attends to parts"),
        (f"--device cuda {CONTEXT} --attention-dropout 0 --cp-comm-type p2p all_gather", "attends to parts"),
        (f"--device cuda {CONTEXT} --attention-dropout 0 --cp-comm-type p2p a2a", None),
        (f"--device cuda {CONTEXT} --attention-dropout 0 --cp-comm-type a2a", None),
        ("--device cuda --transformer-impl transformer_engine", None),
        ("--device cuda --attention-dropout 0", None),
    ],
)
def test_flags_that_choose_nothing_are_said(line: str, reason: str | None) -> None:
    backend, version, said = named_kernel(line)
    assert (backend, version) == (("flash", 3) if reason is None else ("auto", None))
    assert len(said) == (0 if reason is None else 2)
    assert all(reason in warning for warning in said if reason is not None)


def test_auto_says_nothing_on_a_cpu() -> None:
    for backend in ("auto", "local", "unfused"):
        found = configure(shlex.split(f"{MODEL} --device cpu --attention-backend {backend}"))
        assert (settled(found.config), found.typed.warnings) == ((backend, None), ())


def test_a_layer_with_whole_sequences_has_its_kernel_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers may exchange keys in several ways; the first one's says nothing of the others."""
    layout = {"context_parallel_size": 2, "world_size": 2}
    for kinds, measured in ((("p2p", "a2a"), True), (("a2a", "p2p"), True), (("p2p", "all_gather"), False)):
        config = small_config(layout={**layout, "cp_comm_type": kinds})
        assert (attention_kernel._heads(config) is not None) == measured


def test_transformer_engine_chooses_among_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "seconds", lambda *_: pytest.fail("torch's are not asked"))
    config = small_config({"transformer_impl": "transformer_engine"}, training={"attention_backend": "flash"})
    assert choose(config, GPU, None) == attention_kernel.Choice(config)
    assert allowed_kernels(config) == KERNELS, "none of torch's is switched on, whose package may be missing"
    handed = [
        transformer_config(small_config({"transformer_impl": "transformer_engine"}, training=flags), "cuda")
        for flags in ({}, {"attention_backend": "local"}, {"attention_backend": "flash", "flash_attention_version": 3})
    ]
    backends = [(core.attention_backend, core.flash_attention_version) for core in handed]
    assert backends == [(AttnBackend.auto, None), (AttnBackend.auto, None), (AttnBackend.flash, 3)]
    assert transformer_config(small_config(training={"attention_backend": "flash"}), "cuda").attention_backend == (
        AttnBackend.auto
    ), "torch's kernels are chosen elsewhere"


@pytest.mark.parametrize(
    ("backend", "version", "expected"),
    [
        (AttnBackend.auto, None, {"NVTE_FUSED_ATTN": "0", "NVTE_FUSED_ATTN_BACKEND": "1"}),
        (
            AttnBackend.fused,
            None,
            {"FLASH_ATTN": "0", "FUSED_ATTN": "1", "UNFUSED_ATTN": "0", "FUSED_ATTN_BACKEND": "1"},
        ),
        (AttnBackend.auto, 3, {"FLASH_ATTN_V2": "0", "FLASH_ATTN_V4": "0"}),
    ],
)
def test_variables_of_transformer_engine_are_the_users_unless_a_flag_names_a_kernel(
    backend: AttnBackend, version: int | None, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core refuses a variable that Megatron's scripts often set, whoever computes attention."""
    found = {"NVTE_FUSED_ATTN": "0", "NVTE_FUSED_ATTN_BACKEND": "1"}
    monkeypatch.setattr(os, "environ", found)
    gpt: Any = GPT.__new__(GPT)
    gpt.config = SimpleNamespace(attention_backend=backend, flash_attention_version=version)
    gpt._set_attention_backend()
    expected = {name if name.startswith("NVTE_") else f"NVTE_{name}": value for name, value in expected.items()}
    assert expected.items() <= found.items()
    assert version is not None or expected == found
