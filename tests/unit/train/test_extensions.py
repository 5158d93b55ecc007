"""What a user's own parts of a run change of it, each by itself: names, configuration, datasets, refusals."""

import dataclasses
from typing import Any

import pytest

from megatron_ext.cli.pretrain import main
from megatron_ext.config.derived.cuda_graphs import FULL_ITERATION
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.config.schema import Config
from megatron_ext.data.corpus import Splits
from megatron_ext.data.samples import SampleWindow, Source
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.catalogue import Parameter, count
from megatron_ext.parts.own_parameters import with_own_parameters
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.train.extensions import NONE, Extensions, OwnSamples
from megatron_ext.train.trainer import Callback
from tests.support.small_models import small_config

NOTHING: Any = None
PARTS: dict[str, Any] = {
    "callbacks": (Callback,),
    "datasets": lambda config, tokenizer, numbers: NOTHING,
    "loss": lambda logits: NOTHING,
    "layer_spec": lambda spec, layer: spec,
    "layer_parameters": lambda config, layer: [],
    "optimizer": OPTIMIZERS["lion"],
    "learning_rate": lambda samples, rate: rate,
    "families": (NOTHING,),
}


def test_a_part_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"no part of a run is called schedule=; .* learning_rate=, families="):
        main(["--mock-data"], RunStatus(rank=0), schedule=PARTS["learning_rate"])


def test_every_own_part_has_its_name() -> None:
    """An empty list of callbacks is none."""
    assert set(PARTS) == {field.name for field in dataclasses.fields(Extensions)}
    for name, part in PARTS.items():
        assert Extensions(**{name: part}).named() == (name,)
    assert Extensions(**PARTS).named() == tuple(PARTS)
    assert NONE.named() == Extensions(callbacks=[]).named() == ()


def test_callbacks_are_taken_as_they_are_or_made() -> None:
    class Own(Callback):
        """One that is given as a class."""

    there = Own()
    made = Extensions(callbacks=[there, Own, lambda: there]).made_callbacks()
    assert [type(one) for one in made] == [Own, Own, Own]
    assert [one is there for one in made] == [True, False, True]


def test_the_catalogue_lists_own_parameters() -> None:
    config = small_config()
    own = Extensions(
        layer_spec=PARTS["layer_spec"], layer_parameters=lambda config, layer: [Parameter("mix", (5,), 0, "zeros")]
    ).applied(config)
    assert count(own) == count(config) + 4 * 5
    assert to_yaml(own) == to_yaml(config), "no file holds them"


def _config(**groups: dict[str, Any]) -> Config:
    config = small_config()
    for group, values in groups.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    return config


@pytest.mark.parametrize(
    ("parts", "flags", "said"),
    [
        (["layer_parameters"], {}, "layer_parameters= without layer_spec=: no layer has them; give layer_spec=, too"),
        (["layer_parameters", "layer_spec"], {}, None),
        (["layer_spec"], {}, None),
        (
            ["layer_parameters", "layer_spec"],
            {"checkpoint": {"load_hf": "folder"}},
            "--load-hf, but layer_parameters= adds parameters to the layers, which no Hugging Face model holds; leave "
            "--load-hf out",
        ),
        (["layer_spec"], {"checkpoint": {"load_hf": "folder"}}, None),
        (
            ["loss"],
            {"training": {"linear_cross_entropy": True}},
            "--linear-cross-entropy keeps no logits, which this run's own loss is given; leave "
            "--linear-cross-entropy out",
        ),
        (["layer_spec"], {"training": {"linear_cross_entropy": True}}, None),
        (
            ["loss"],
            {"model": {"z_loss_strength": 0.5}},
            "--z-loss-strength 0.5 is a part of the cross-entropy, in whose place this run's own loss stands; add "
            "z * token.log_normalizer() ** 2 to that, and leave the flag out",
        ),
    ],
)
def test_own_parts_that_cannot_work(parts: list[str], flags: dict[str, Any], said: str | None) -> None:
    own, config = Extensions(**{name: PARTS[name] for name in parts}), _config(**flags)
    if said is None:
        assert own.applied(config) == with_own_parameters(config, own.layer_parameters)
        return
    with pytest.raises(ConfigurationError) as raised:
        own.applied(config)
    assert str(raised.value) == said


@pytest.mark.parametrize("name", PARTS)
def test_no_graph_is_made_of_what_is_called_within_the_passes(name: str) -> None:
    """Loss and layers; the rest runs between the steps."""
    own = Extensions(
        **{"layer_spec": PARTS["layer_spec"], name: PARTS[name]} if name == "layer_parameters" else {name: PARTS[name]}
    )
    for asked in (FULL_ITERATION, "local"):
        found = own.applied(_config(training={"cuda_graph_impl": asked})).training.cuda_graph_impl
        within = name in ("loss", "layer_spec", "layer_parameters")
        assert found == ("none" if within and asked == FULL_ITERATION else asked)
        warnings = own.warnings({"cuda_graph_impl": asked})
        assert len(warnings) == (within and asked == FULL_ITERATION)
        assert own.warnings({}) == []
        part = "layer_spec" if name == "layer_parameters" else name
        assert all(f"{part}= (nobody knows what it does in Python" in warning for warning in warnings)


def test_an_own_optimizer_is_registered_and_takes_the_place_of_the_flags() -> None:
    """As often as the process trains, and for as long as a run lasts; another one of the same name is refused."""
    own = dataclasses.replace(OPTIMIZERS["lion"], name="mine", title="Mine", schemes=frozenset({"use_torch_fsdp2"}))
    config = _config(layout={"use_torch_fsdp2": True, "world_size": 2})
    with Extensions(optimizer=own).registered():
        for _ in range(2):
            applied = Extensions(optimizer=own).applied(config)
            optimizer = dataclasses.replace(config.optimizer, optimizer="mine")
            assert applied == dataclasses.replace(config, optimizer=optimizer)
        assert OPTIMIZERS["mine"] is own
        other = dataclasses.replace(own, title="Another")
        with pytest.raises(
            ConfigurationError, match=r"^there is an optimizer 'mine' already; give yours another name$"
        ):
            Extensions(optimizer=other).applied(config)
        for scheme in ("use_distributed_optimizer", "use_megatron_fsdp"):
            flag = f"--{scheme.replace('_', '-')}"
            strategy = {"data_parallel_sharding_strategy": "optim_grads_params"} if "fsdp" in scheme else {}
            refused = _config(layout={scheme: True, "world_size": 2, **strategy})
            with pytest.raises(
                ConfigurationError, match=rf"^{flag} cannot run Mine: its traits do not name the scheme"
            ):
                Extensions(optimizer=own).applied(refused)
        assert Extensions(optimizer=own).applied(_config()).optimizer.optimizer == "mine", "no scheme at all"
    assert "mine" not in OPTIMIZERS


class _Dataset:
    def __init__(self, samples: int):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), [index] * 4)


@pytest.mark.parametrize(
    ("held", "said"), [(40, None), (41, None), (39, "has 39 samples"), (0, "has 0 samples"), (None, "has 0 samples")]
)
def test_own_training_data_is_enough(held: int | None, said: str | None) -> None:
    config: Any = small_config()
    asked: list[Any] = []

    def make(*given: Any) -> Splits[Any]:
        asked.append(given)
        return Splits(None if held is None else _Dataset(held), _Dataset(7), _Dataset(9))

    own = Extensions(datasets=make)
    tokenizer: Any = "tokenizer"
    numbers = Splits(40, 8, 8)
    if said is not None:
        with pytest.raises(ConfigurationError, match=rf"^the own training dataset {said}, and the run reads 40; "):
            own.own_datasets(config, tokenizer, numbers)
        return
    found = own.own_datasets(config, tokenizer, numbers)
    assert found is not None
    assert asked == [(config, "tokenizer", numbers)]
    assert [len(one) for one in (found.train, found.valid, found.test) if one is not None] == [held, 7, 9]
    assert NONE.own_datasets(config, tokenizer, numbers) is None
    without = Extensions(datasets=lambda *_: Splits(_Dataset(40), None, None)).own_datasets(config, tokenizer, numbers)
    assert without is not None
    assert (without.valid, without.test) == (None, None)


def test_an_own_dataset_is_one_source() -> None:
    samples = OwnSamples(_Dataset(12), 4)
    assert (len(samples), samples[5], samples.counts(7)) == (12, _Dataset(12)[5], [7])
    assert samples.sources == [Source("_Dataset", 12)]
    assert samples.window_at(5) == SampleWindow(0, 5)
    assert samples.part(0) is samples
    assert samples.order_depends_on == []
