"""A run of stand-ins whose parts can be told apart, for tests of what is saved and loaded: no two values are equal."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import contents
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.torch_optimizer import torch_optimizer
from megatron_ext.sharding.parts import OnDevice
from megatron_ext.train.state import TrainState
from tests.support.small_models import small_config

YES_NO = (False, True)
FIELDS = [field.name for field in dataclasses.fields(TrainState)]


def _group(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


class Tracker:
    """The engine's generators of dropout."""

    def __init__(self) -> None:
        self.states = {name: torch.tensor([number]) for number, name in enumerate(("tp", "tp-expert", "data"), 10)}

    def get_states(self) -> dict[str, torch.Tensor]:
        return self.states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


class Made:
    """A run of rank 13 whose parts can be told apart, and what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
        self.asked: list[Any] = []
        self.tracker, self.of_device = Tracker(), torch.tensor([99])
        config = small_config()
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **flags))
        self.state = TrainState(**{name: 11 + number for number, name in enumerate(FIELDS)})  # pyright: ignore
        self.run: Any = SimpleNamespace(
            config=config,
            state=self.state,
            rank=13,
            groups=SimpleNamespace(pp=_group(2, 1), dp_cp=_group(3, 2), tp=_group(5, 4)),
            device=SimpleNamespace(rng_state=lambda: self.of_device, set_rng_state=self._set_rng_state, kind="cpu"),
            optimizer="the optimizer",
            sharding=SimpleNamespace(reload_masters=lambda optimizer: self.asked.append(("masters of", optimizer))),
            data_record={"seed": 7},
        )
        for name, value in {
            "random_tracker": lambda: self.tracker,
            "optimizer_parts": lambda run: ["part"] if run is self.run else None,
            "grad_scaler_state": lambda run: {"scale": 8.0},
            "set_grad_scaler": lambda run, state: self.asked.append(("scaler", state)),
            "_chunks": lambda run: {"model": self._chunk("model"), "model1": self._chunk("model1")},
        }.items():
            monkeypatch.setattr(contents, name, value)
        for name, answer in {"step_count": 6, "set_step_count": None, "restore": None, "take": ["taken"]}.items():
            monkeypatch.setattr(
                contents.optimizer_state,
                name,
                lambda *given, name=name, answer=answer: self.asked.append((name, *given)) or answer,
            )

    def _chunk(self, name: str) -> Any:
        return SimpleNamespace(load_state_dict=lambda state: self.asked.append((name, state)))

    def _set_rng_state(self, state: torch.Tensor) -> None:
        self.of_device = state

    def numbers(self) -> list[int]:
        """Return the numbers of the state, in the order of FIELDS."""
        return [getattr(self.state, name) for name in FIELDS]

    def random(self) -> dict[str, int]:
        """Return the states of the device's generator, whose name is empty, and of those of dropout."""
        return {"": int(self.of_device), **{name: int(state) for name, state in self.tracker.states.items()}}


LOADED = {
    "model": "first chunk",
    "model1": "second chunk",
    "optimizer": "its state",
    "optimizer_step": 5,
    "grad_scaler": "its scale",
    "train_state": {**{name: 101 + number for number, name in enumerate(FIELDS)}, "of another version": 1},
    "rng_state": {
        "dropout": torch.tensor([1]),
        "tracker": {"tp": torch.tensor([2]), "tp-expert": torch.tensor([3]), "data": torch.tensor([4])},
    },
}
"""What a checkpoint gives back, each part by its name."""


def optimizer_part(config: OptimizerConfig, weights: list[torch.nn.Parameter], *, divides: bool) -> Any:
    """Return a part of the optimizer that updates these weights; `divides` says whether ranks divide its state."""
    made = torch_optimizer(config)([{"params": weights}])
    return SimpleNamespace(
        main_parameters=lambda: [(weight, weight) for weight in weights],
        updater=OnDevice(made),
        saves_master=lambda weight: False,
        rows_to_read=lambda weight: None,
        divides_state=divides,
    )
