"""An optimizer in host memory: what of a sharding scheme it leaves as it is, and who updates which tensor where."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.sharding import host_memory, row_shards
from megatron_ext.sharding.host_memory import HostOptimizer, InHostMemory
from megatron_ext.sharding.row_shards import HostRowOptimizer, RowShardOptimizer
from tests.support.small_models import config_of_two, small_config

HANDED_ON = {
    "shard": ("chunks", "core", "groups", "device"),
    "gathered": ("chunks",),
    "gathered_before_update": ("chunks",),
    "weights_in_place": ("chunks",),
    "reduced_gradients": ("chunk",),
    "watch": ("chunk", "watcher"),
    "holders_of_one_copy": ("optimizer", "groups"),
    "held_weights": ("chunk",),
    "held_gradients": ("chunk",),
    "clip": ("optimizer", 2.0, 5.0),
}
"""Methods of a scheme that an optimizer in host memory changes nothing of, with arguments."""


@pytest.mark.parametrize("name", HANDED_ON)
def test_the_rest_of_a_scheme_is_its_own(name: str) -> None:
    heard: list[Any] = []
    methods: dict[str, Any] = {
        one: lambda *given, one=one: heard.append((one, given)) or f"result of {one}" for one in HANDED_ON
    }
    scheme: Any = SimpleNamespace(config=small_config(), builds_on_meta=True, lives_on_host=False, **methods)
    result = getattr(InHostMemory(scheme), name)(*HANDED_ON[name])
    assert heard == [(name, HANDED_ON[name])]
    assert result == (None if name in ("watch", "clip") else f"result of {name}")


def test_what_only_the_update_needed_is_freed_by_both() -> None:
    done: list[Any] = []
    parts = [
        SimpleNamespace(core=SimpleNamespace(optimizer=SimpleNamespace(release=lambda name=name: done.append(name))))
        for name in ("first", "second")
    ]
    scheme: Any = SimpleNamespace(
        config=small_config(),
        builds_on_meta=False,
        lives_on_host=False,
        parts=lambda optimizer: parts,
        finish_update=lambda optimizer: done.append(optimizer),
    )
    optimizer: Any = "the scheme's"
    InHostMemory(scheme).finish_update(optimizer)
    assert done == ["the scheme's", "first", "second"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_each_part_of_the_optimizer_updates_in_host_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is pinned for a device; the part's updater is what has taken the place."""
    parts = [SimpleNamespace(core=SimpleNamespace(optimizer="built"), updater=None) for _ in range(2)]
    monkeypatch.setattr(host_memory, "HostOptimizer", lambda part, config, pin: ("in host memory", config, pin))
    config = small_config()
    built: Any = "optimizer"
    scheme: Any = SimpleNamespace(
        config=config,
        builds_on_meta=False,
        lives_on_host=False,
        optimizer=lambda *given: built if given == ("chunks", "groups", device) else None,
        parts=lambda optimizer: parts,
    )
    device: Any = SimpleNamespace(kind=kind)
    chunks: Any = "chunks"
    groups: Any = "groups"
    here = InHostMemory(scheme)
    assert here.optimizer(chunks, groups, device) == built
    expected = ("in host memory", config.optimizer, kind == "cuda")
    assert [part.core.optimizer for part in parts] == [expected, expected]
    assert [part.updater for part in here.parts(built)] == [expected, expected]


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize(
    ("flags", "pinned", "other"),
    [
        ({}, (True, True), {}),
        ({"no_pin_cpu_grads": True}, (False, True), {}),
        ({"no_pin_cpu_params": True}, (True, False), {}),
        ({"optimizer_offload_fraction": 0.25}, (True, True), {"offload_fraction": 0.25}),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, (True, True), {"overlap_cpu_optimizer_d2h_h2d": True}),
    ],
)
def test_flags_of_an_optimizer_in_host_memory(
    flags: dict[str, Any], pinned: tuple[bool, bool], other: dict[str, Any], pin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients and weights are pinned each by its own flag, and only where there is a device."""
    asked: list[dict[str, Any]] = []
    released: list[bool] = []
    monkeypatch.setattr(
        host_memory.HybridDeviceOptimizer, "__init__", lambda self, groups, **named: asked.append(named)
    )
    monkeypatch.setattr(HostOptimizer, "release", lambda self: released.append(True))
    monkeypatch.setattr(host_memory, "torch_optimizer", lambda config: "torch's")
    monkeypatch.setattr(host_memory, "_device_optimizer", lambda built, config, groups: (built, config, groups))
    short, long = torch.nn.Parameter(torch.zeros(1).bfloat16()), torch.nn.Parameter(torch.zeros(1))
    master = torch.zeros(1)
    part: Any = SimpleNamespace(
        core=SimpleNamespace(optimizer=SimpleNamespace(param_groups=["groups"])),
        main_parameters=lambda: iter([(short, master), (long, long)]),
    )
    config = config_of_two(**flags).optimizer
    made: Any = HostOptimizer(part, config, pin=pin)
    [named] = asked
    on_device = named.pop("gpu_optimizer_cls")
    assert on_device("groups") == (part.core.optimizer, config, "groups")
    gradients, weights = pinned
    assert named == {
        "offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": False,
        **other,
        "cpu_optimizer_cls": "torch's",
        "pin_cpu_grads": pin and gradients,
        "pin_cpu_params": pin and weights,
    }
    assert made._pin_masters is (pin and weights)
    assert (made._masters, released) == ({id(master)}, [True]), "of 16-bit weights; there is no update under way"


@pytest.mark.parametrize(
    ("asked", "torchs", "replaced"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_what_stays_on_the_device_is_updated_by_what_was_built(
    asked: bool, torchs: bool, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "is_torchs", lambda built, config: torchs)
    monkeypatch.setattr(host_memory, "over", lambda groups, config: ("torch's", groups))
    built: Any = SimpleNamespace(param_groups="of all")
    groups: Any = "of the rest"
    config = config_of_two(use_torch_optimizer_for_cpu_offload=asked).optimizer
    found = host_memory._device_optimizer(built, config, groups)
    assert found == (("torch's", "of the rest") if replaced else built)
    assert built.param_groups == ("of all" if replaced else "of the rest")


def test_who_updates_a_tensor_in_host_memory_or_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its copy in host memory where there is one; masters that are there alone are away from the device."""
    weight, master, stays = (torch.full((2,), float(number)) for number in range(3))
    copies = {one: one + 10.0 for one in (weight, master)}
    on_host = SimpleNamespace(param_groups=[{"params": [copies[weight]]}, {"params": [copies[master]]}])
    on_device = SimpleNamespace(param_groups=[{"params": [stays]}])

    def init(self: Any) -> None:
        self.cpu_optimizers, self.gpu_optimizer = [on_host], on_device

    monkeypatch.setattr(host_memory.HybridDeviceOptimizer, "_init_sub_optimizers", init)
    made: Any = HostOptimizer.__new__(HostOptimizer)
    made.param_to_inner_param, made.gpu_params_map_cpu_copy = {**copies, stays: stays}, copies
    made._masters = {id(master)}
    made._init_sub_optimizers()
    for main, updater, tensor in (
        (weight, on_host, copies[weight]),
        (master, on_host, copies[master]),
        (stays, on_device, stays),
    ):
        found, inner = made.updated_by(main)
        assert found is updater
        assert inner is tensor
    assert [made.master_of(one) is kept for one, kept in ((weight, weight), (master, copies[master]), (stays, stays))]
    assert [id(one) for one in made._away] == [id(master)]
    assert (made.torch_optimizers, made.host_optimizers) == ([on_host, on_device], [on_host])


@pytest.mark.parametrize("torchs", [False, True])
def test_rows_in_host_memory_are_updated_by_torch(torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a package has built is for GPUs alone. The norm of all gradients is one number on the device."""

    def init(self: Any, optimizer: Any, dtype: Any, groups: Any) -> None:
        assert (dtype, groups) == (torch.bfloat16, "groups")
        self.optimizer = optimizer

    monkeypatch.setattr(RowShardOptimizer, "__init__", init)
    monkeypatch.setattr(row_shards, "is_torchs", lambda built, config: torchs)
    monkeypatch.setattr(row_shards, "over", lambda groups, config: ("torch's", groups, config))
    built: Any = SimpleNamespace(param_groups="groups of it")
    groups: Any = "groups"
    config: Any = "config"
    made: Any = HostRowOptimizer(built, torch.bfloat16, groups, torch.device("meta"), config)
    assert made.optimizer == (built if torchs else ("torch's", "groups of it", "config"))
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
    monkeypatch.setattr(
        row_shards.FP32Optimizer, "get_grads_for_grad_norm", lambda self, group=None: gradients if group is None else []
    )
    [norm] = made.get_grads_for_grad_norm()
    assert (norm.device.type, norm.shape) == ("meta", (1,))
    made._device = torch.device("cpu")
    assert made.get_grads_for_grad_norm()[0].tolist() == [13.0]
    assert made.get_grads_for_grad_norm("another") == []
