"""The registry of optimizers: what it says is what torch's classes keep and take, and everybody reads it."""

import ast
import copy
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_ext.config.derived.optimizer_traits import OptimizerTraits, State
from megatron_ext.config.derived.optimizers import OPTIMIZERS, traits_of
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config, OptimizerConfig
from megatron_ext.cost.state_bytes import state_bytes
from megatron_ext.errors import ConfigurationError
from megatron_ext.optim.short_adam import ShortAdam, keep, kept_average
from megatron_ext.optim.torch_optimizer import as_registered, is_maskable, is_torchs, mask_by, over, torch_optimizer
from megatron_ext.parts.catalogue import count
from megatron_ext.plugins.doctor.machine import checkpoint_bytes
from megatron_ext.plugins.migrate.translate import translate
from megatron_ext.train.extensions import Extensions
from tests.support.syntax import nodes_of, source
from tests.support.wrong_flags import BASE

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_ext"
SHORT = ["adam --exp-avg-dtype bf16", "adam --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"]
ALONE = {name: traits for name, traits in OPTIMIZERS.items() if traits.of_elements is None}
"""Those of one update: test_muon.py has the others."""
EVERY = [*ALONE, "sgd --sgd-momentum 0", *SHORT]
"""Values of --optimizer, with what changes the states that are kept."""


def _configuration(line: str) -> Config:
    return resolve(parse(shlex.split(f"{BASE} {line}")).values, Facts())


def _settings(optimizer: str) -> OptimizerConfig:
    return _configuration(f"--optimizer {optimizer}").optimizer


def _updated(settings: OptimizerConfig) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    """An optimizer after one update of a tensor of 6 elements."""
    weight = torch.linspace(-1, 1, 6)
    optimizer = torch_optimizer(settings)([{"params": [weight], "lr": 0.1, "weight_decay": 0.0}])
    weight.grad = torch.linspace(1, 2, 6)
    optimizer.step()
    return optimizer, weight


@pytest.mark.parametrize("optimizer", EVERY)
def test_the_states_are_those_that_torch_keeps(optimizer: str) -> None:
    """By name, shape, dtype and bytes; a count of updates is one number more."""
    settings = _settings(optimizer)
    traits, (made, weight) = traits_of(settings), _updated(settings)
    kept = {name: value for name, value in made.state[weight].items() if value is not None}
    assert ("step" in kept) == traits.counts_updates
    for name in ("step", *traits.numbers):
        kept.pop(name, None)
    assert tuple(kept) == traits.state_names(settings)
    for state in traits.kept(settings):
        assert kept[state.name].shape == weight.shape
        assert kept[state.name].dtype == getattr(torch, state.dtype)
    assert traits.bytes_each(settings) * weight.numel() == sum(value.nbytes for value in kept.values())


def test_an_own_state_that_no_checkpoint_would_hold_is_refused() -> None:
    """With its first update, and not when a resumed run begins it from nothing."""
    own = replace(OPTIMIZERS["lion"], name="mine", states=(State("velocity"),))
    with Extensions(optimizer=own).registered():
        settings = Extensions(optimizer=own).applied(_configuration("")).optimizer
        said = "the optimizer 'mine' keeps the state 'exp_avg', which its traits do not name"
        with pytest.raises(ConfigurationError, match=said):
            _updated(settings)


def _trained(optimizer: torch.optim.Optimizer, weight: torch.Tensor, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight


def test_adam_with_averages_in_fp32_is_torchs() -> None:
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours, torchs = torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 64)
    found = _trained(ShortAdam([ours], **settings, dtypes=("fp32", "fp32")), ours, 30)
    known = _trained(torch.optim.AdamW([torchs], **settings), torchs, 30)
    torch.testing.assert_close(found, known, rtol=1e-6, atol=1e-7)


def test_averages_in_bf16_are_those_in_fp32_rounded() -> None:
    """After one update each is a product, rounded once; after many the weights are where they would be but for some
    rounding."""
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    short, exact = torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 64)
    rounded = ShortAdam([short], **settings)
    known = torch.optim.AdamW([exact], **settings)
    _trained(rounded, short, 1)
    _trained(known, exact, 1)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(rounded.state[short][name], known.state[exact][name].bfloat16())
    distance = (_trained(rounded, short, 30) - _trained(known, exact, 30)).abs().max()
    assert 0 < distance < 30 * 0.01 * 2**-7


def test_averages_in_fp16_are_those_in_fp32_but_for_rounding() -> None:
    """Gradients of 1e-9 to 100, whose squares fp16 alone would lose: each average to 2^-10 of itself after one update,
    and weights where they would be after many."""
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    short, exact = torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 64)
    rounded = ShortAdam([short], **settings, dtypes=("fp16", "fp16"))
    known = torch.optim.AdamW([exact], **settings)
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-9, 2, 64)
    for step in range(30):
        short.grad = exact.grad = size * torch.randn(64, generator=generator)
        rounded.step()
        known.step()
        kept = rounded.state[short]
        assert kept["exp_avg"].dtype == kept["exp_avg_sq"].dtype == torch.float16
        if step == 0:
            for name in ("exp_avg", "exp_avg_sq"):
                found, value = kept_average(kept[name], name), known.state[exact][name]
                normal = value.abs().sqrt() > (2.5e-7 if name == "exp_avg_sq" else 0)
                torch.testing.assert_close(found[normal], value[normal], rtol=2**-9.9, atol=0)
                assert (found[~normal].sqrt() - value[~normal].sqrt()).abs().le(2.0**-33 * 1.01).all()
    assert 0 < (short - exact).abs().max() < 30 * 0.01 * 2**-8


def test_gradients_in_16_bits_are_taken_in_fp32() -> None:
    """Their squares are not rounded to 16 bits."""
    found, known = torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 64)
    ours, same = (ShortAdam([weight], dtypes=("fp32", "fp32")) for weight in (found, known))
    gradient = torch.linspace(0.1, 2, 64).bfloat16()
    found.grad, known.grad = torch.zeros(64), gradient.float()
    ours._update(found, gradient, ours.param_groups[0])
    same.step()
    assert torch.equal(found, known)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours.state[found][name], same.state[known][name])


def test_updates_are_counted_beyond_what_16_bits_hold() -> None:
    """bf16 counts to 256 and fp16 to 2,048; the next update's correction of the bias is that of its number."""
    for dtypes in (("bf16", "bf16"), ("fp16", "fp32")):
        weight = torch.zeros(3)
        optimizer = ShortAdam([weight], lr=1.0, betas=(0.5, 0.9999), dtypes=dtypes)
        weight.grad = torch.ones(3)
        optimizer.step()
        state = optimizer.state[weight]
        state["step"].fill_(2048.0)
        optimizer.step()
        optimizer.step()
        assert (float(state["step"]), state["step"].dtype) == (2050.0, torch.float32)


def test_an_average_in_fp16_is_never_infinite() -> None:
    kept = torch.zeros(2, dtype=torch.float16)
    keep(kept, "exp_avg_sq", torch.tensor([1e30, 0.0]))
    assert kept_average(kept, "exp_avg_sq").tolist() == [(65504 / 256) ** 2, 0.0]


@pytest.mark.parametrize("optimizer", EVERY)
def test_bytes_of_the_registry_are_those_of_dry_run_and_doctor(optimizer: str) -> None:
    config = _configuration(f"--bf16 --optimizer {optimizer}")
    each = traits_of(config.optimizer).bytes_each(config.optimizer)
    assert state_bytes(config).optimizer == each + 4
    without = _configuration(f"--bf16 --no-save-optim --optimizer {optimizer}")
    assert checkpoint_bytes(config) - checkpoint_bytes(without) == (each + 4) * count(config)


@pytest.mark.parametrize("traits", ALONE.values(), ids=ALONE)
def test_flags_reach_the_arguments_of_torchs_class(traits: OptimizerTraits) -> None:
    """A value that is not the default arrives under the name that the class has for it."""
    defaults = {name: options_by_name()[name].default for name in traits.flags}
    others = {name: default + 1 if isinstance(default, int) else default / 2 for name, default in defaults.items()}
    given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in others.items())
    made, _ = _updated(_settings(f"{traits.name} {given}"))
    expected = traits.values(_settings(f"{traits.name} {given}"))
    assert expected
    for argument, value in expected.items():
        assert made.param_groups[0][argument] == value != traits.values(_settings(traits.name))[argument]


@pytest.mark.parametrize("traits", ALONE.values(), ids=ALONE)
def test_groups_of_views_are_updated_as_they_are(traits: OptimizerTraits) -> None:
    """torch refuses a view of a weight; a flat shard of the distributed optimizer is one."""
    settings = _settings(traits.name)
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 8))
    shard = weight.view(-1)[2:]
    groups = [{"params": [shard], "lr": 0.1, "weight_decay": 0.0, "wd_mult": 0.0}, {"params": [], "lr": 0.1}]
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        torch_optimizer(settings)(groups)
    made = over(groups, settings)
    assert is_torchs(made, settings)
    assert [len(group["params"]) for group in made.param_groups] == [1, 0]
    assert made.param_groups[0]["wd_mult"] == 0.0
    same, alone = _updated(settings)
    with torch.no_grad():
        shard.copy_(torch.linspace(-1, 1, 6))
    shard.grad = torch.linspace(1, 2, 6)
    made.step()
    assert torch.equal(weight[2:], alone)
    assert is_torchs(same, settings)


class OfAPackage(torch.optim.SGD):
    """A kernel of another package, which megatron-core has built."""


def test_what_the_engine_has_built_of_a_package_stays_unless_the_optimizer_is_ours() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    built = OfAPackage([{"params": [weight], "lr": 0.5, "weight_decay": 0.25, "wd_mult": 0.0}], momentum=0.5)
    assert as_registered(built, _settings("adam")) is built
    assert not built.param_groups[0]["fused"], "an option of torch's own class"
    ours = as_registered(built, _settings("lion"))
    [group] = ours.param_groups
    assert group["params"] == [weight]
    assert (group["lr"], group["weight_decay"], group["wd_mult"]) == (0.5, 0.25, 0.0)
    assert "momentum" not in group


def test_the_choices_are_the_registry() -> None:
    assert options_by_name()["optimizer"].choices == tuple(OPTIMIZERS)
    assert [traits.name for traits in OPTIMIZERS.values()] == list(OPTIMIZERS)


@pytest.mark.parametrize("traits", [one for one in ALONE.values() if "deepspeed" in one.elsewhere])
def test_deepspeeds_arguments_become_the_flags_of_the_optimizer(traits: OptimizerTraits) -> None:
    """Whichever of type and params comes first in the file."""
    params = {"betas": [0.6, 0.7], "eps": 1e-5, "momentum": 0.5, "weight_decay": 0.1}
    [name, *_] = traits.elsewhere["deepspeed"].names
    values = {"betas": ["0.6", "0.7"], "eps": ["1e-05"], "momentum": ["0.5"]}
    expected = {"--optimizer": traits.name, "--weight-decay": "0.1", "--clip-grad": "0"}
    for argument, names in traits.arguments.items():
        names = (names,) if isinstance(names, str) else names
        expected |= {f"--{n.replace('_', '-')}": v for n, v in zip(names, values[argument], strict=True)}
    for file in ({"type": name, "params": params}, {"params": params, "type": name}):
        result = translate("deepspeed", {"optimizer": file})
        assert result.command == expected
        ignored = {key.name.rpartition(".")[2] for key in result.keys if "does not read it" in key.reason}
        assert ignored == values.keys() - traits.arguments.keys()


def test_nobody_else_asks_which_optimizer_it_is() -> None:
    """What differs between optimizers is a field of `OptimizerTraits`."""
    asks = {}
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(source(path)):
            by_type = isinstance(node, ast.Attribute) and node.attr in ("Adam", "AdamW", "SGD")
            if not isinstance(node, ast.Compare) and not by_type:
                continue
            text = ast.unparse(node)
            by_name = isinstance(node, ast.Compare) and any(f"'{name}'" in text for name in OPTIMIZERS)
            by_type = by_type and text.startswith("torch.optim.")
            if by_name or by_type:
                asks[str(path.relative_to(PACKAGE))] = text
    assert not asks


def test_torchs_own_gets_the_options_that_make_it_fast() -> None:
    """In every group: megatron-core builds it without them."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    built = torch.optim.AdamW([{"params": [weight]} for weight in weights])
    assert as_registered(built, _settings("adam")) is built
    assert [group["fused"] for group in built.param_groups] == [True, True]


MASKED = ["adam", "lion"]
Made = tuple[list[torch.nn.Parameter], torch.optim.Optimizer]


def _made(name: str) -> Made:
    torch.manual_seed(1)
    weights = [
        torch.nn.Parameter(torch.randn(5, 7)),
        torch.nn.Parameter(torch.randn(3)),
        torch.nn.Parameter(torch.empty(0)),
    ]
    return weights, torch_optimizer(OptimizerConfig(optimizer=name, lr=0.1))(
        [{"params": weights, "lr": 0.1, "weight_decay": 0.1, "update": "element"}]
    )


def _update(made: Made, values: Callable[[torch.Tensor], torch.Tensor] = torch.randn_like) -> None:
    for weights in made[0]:
        weights.grad = values(weights)
    made[1].step()


def _all(made: Made) -> list[torch.Tensor]:
    states = [value for weights in made[0] for _, value in sorted(made[1].state[weights].items())]
    return copy.deepcopy([weights.detach() for weights in made[0]] + states)


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", MASKED)
def test_a_bad_update_changes_nothing_and_the_next_is_as_if_it_had_not_been(name: str) -> None:
    plain, masked, found_inf = _made(name), _made(name), torch.zeros(())
    mask_by(masked[1], found_inf)
    for step in range(4):
        torch.manual_seed(step)
        _update(plain)
        torch.manual_seed(step)
        _update(masked)
        assert _equal(_all(masked), _all(plain))
        found_inf.fill_(1.0)
        _update(masked, lambda weights: torch.full_like(weights, torch.nan))
        assert _equal(_all(masked), _all(plain))
        found_inf.zero_()


@pytest.mark.parametrize("name", MASKED)
def test_the_state_of_a_first_bad_update_is_that_of_none(name: str) -> None:
    masked, found_inf = _made(name), torch.ones(())
    weights = [one.detach().clone() for one in masked[0]]
    mask_by(masked[1], found_inf)
    _update(masked, lambda one: torch.full_like(one, torch.inf))
    assert _equal(_all(masked)[:3], weights)
    assert all(not value.any() for value in _all(masked)[3:])
    assert len(_all(masked)) > 3


def test_what_counts_on_the_host_or_is_of_another_package_is_not_masked() -> None:
    class OfAPackage(torch.optim.Optimizer):
        """Adam, by its name."""

    settings = {name: OptimizerConfig(optimizer=name) for name in OPTIMIZERS}
    assert {name for name in OPTIMIZERS if is_maskable(_made(name)[1], settings[name])} == set(MASKED)
    short = OptimizerConfig(optimizer="adam", exp_avg_dtype="bf16")
    assert not is_maskable(torch_optimizer(short)(_made("adam")[0]), short)
    assert not is_maskable(OfAPackage(_made("adam")[0], {}), settings["adam"])


def test_an_optimizer_of_megatrons_package_is_a_choice_or_refused_by_name() -> None:
    """megatron-core takes the names of emerging-optimizers that it registers, and no others."""
    registry = pytest.importorskip("emerging_optimizers").registry  # it needs Triton
    names = {*registry.get_optimizer_name_list(), "psgd_pro", "oblique_adam", "oblique_sgd"}
    assert names & {*OPTIMIZERS}
    for name in names - {*OPTIMIZERS}:
        with pytest.raises(ConfigurationError, match=f"--optimizer.*{name}"):
            parse(["--optimizer", name])
