"""Curves of learning rate and weight decay with which a run goes on are the checkpoint's, or are chosen."""

from typing import Any

import pytest

from megatron_ext.config.resolve import Facts
from megatron_ext.train.resumed_curves import other_curves
from tests.support.small_models import config_with

CURVES: dict[str, Any] = {"lr": 1.0, "global_batch_size": 4, "train_iters": 10}


@pytest.mark.parametrize(
    ("saved", "flags", "different"),
    [
        (CURVES, {}, None),
        ({**CURVES, "lr": 2.0}, {}, "--lr 1.0 instead of 2.0"),
        ({**CURVES, "min_lr": 0.5}, {}, "--min-lr 0.0 instead of 0.5"),
        ({**CURVES, "train_iters": 20}, {}, "decay in samples 40 instead of 80"),
        ({**CURVES, "lr_warmup_iters": 2}, {}, "warmup in samples 0 instead of 8"),
        (
            {**CURVES, "lr": 2.0, "min_lr": 0.5},
            {},
            "--lr 1.0 instead of 2.0, --min-lr 0.0 instead of 0.5",
        ),
        ({**CURVES, "weight_decay": 0.5}, {}, "weight decay 0.01 to 0.01 in 40 samples instead of 0.5 to 0.5 in 40"),
        ({**CURVES, "lr_group": ("*=2", "a=1")}, {}, "--lr-group none instead of *=2 a=1"),
        ({**CURVES, "lr": 2.0}, {"finetune": True}, None),
        ({**CURVES, "lr": 2.0}, {"no_load_optim": True}, None),
        ({**CURVES, "lr": 2.0}, {"override_opt_param_scheduler": True}, None),
        ({**CURVES, "lr": 2.0}, {"use_checkpoint_opt_param_scheduler": True}, None),
        (None, {}, None),
        ({"lr": 2.0, "train_iters": 10}, {}, None),
        ({"lr": 2.0, "global_batch_size": 4}, {}, None),
        ({"global_batch_size": 4, "train_iters": 10}, {}, None),
    ],
)
def test_other_curves_than_the_checkpoints_are_refused(
    saved: dict[str, Any] | None, flags: dict[str, Any], different: str | None
) -> None:
    """Unless they are chosen, or nothing of the optimizer is loaded. Only a run's configuration has any."""
    config = config_with(
        optimizer={"lr": 1.0},
        training={"train_iters": 10, "global_batch_size": 4},
        checkpoint={"load": "ckpt", **flags},
    )
    found = other_curves(config, Facts(saved=saved))
    assert len(found) == (different is not None)
    for text in found:
        assert text.startswith(
            "the curves of learning rate and weight decay are not those of the checkpoint in --load ckpt: "
        )
        assert f": {different}" in text
        assert "; add --override-opt-param-scheduler to follow the flags, or" in text


_STYLES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {},
    "cosine": {},
    "inverse-square-root": {},
    "WSD": {"lr_wsd_decay_iters": 4},
    "power": {"lr_power_scale": 1e-3, "lr_power_exponent": -0.5},
}


def _differences(then: dict[str, Any], now: dict[str, Any], iters: tuple[int, int], iteration: int) -> list[str]:
    """What is said of a run of 20 iterations that goes on along the curves `now` after `iteration` of `then`."""
    saved = {**CURVES, **then, "train_iters": iters[0], "seq_length": 8}
    config = config_with(
        model={"seq_length": 8},
        optimizer={"lr": 1.0, **now},
        training={"train_iters": iters[1], "global_batch_size": 4},
        checkpoint={"load": "ckpt"},
    )
    return other_curves(config, Facts(saved=saved), iteration)


@pytest.mark.parametrize("style", _STYLES)
def test_a_longer_run_is_refused_where_a_value_to_come_is_another(style: str) -> None:
    """Also where the shorter one was at its end: a rate that has decayed would rise again."""
    flags = {"lr_decay_style": style, "lr_warmup_iters": 2, **_STYLES[style]}
    follows_the_length = style in ("linear", "cosine", "WSD")
    for iteration in (1, 5, 10):
        assert bool(_differences(flags, flags, (10, 20), iteration)) == follows_the_length
        decay = {**flags, "lr_decay_iters": 10}
        assert _differences(decay, decay, (10, 20), iteration) == []
        assert _differences(decay, {**decay, "lr_decay_iters": 15}, (20, 20), iteration) != [] or style == "constant"


def test_a_warmup_that_is_over_is_not_compared() -> None:
    flags = {"lr_decay_style": "constant", "lr_warmup_iters": 2}
    assert _differences(flags, {**flags, "lr_warmup_iters": 3}, (10, 20), 3) == []
    [told] = _differences(flags, {**flags, "lr_warmup_iters": 3}, (10, 20), 2)
    assert ": warmup in samples 12 instead of 8, " in told
    [told] = _differences(flags, {**flags, "decoupled_lr": 0.5}, (10, 20), 3)
    assert ": --decoupled-lr 0.5 instead of None; add" in told


def test_a_weight_decay_that_has_grown_may_stay_there() -> None:
    growing = {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.0, "end_weight_decay": 0.5}
    flags = {"lr_decay_style": "constant"}
    assert "weight decay 0.0 to 0.5 in 80" in _differences(flags | growing, flags | growing, (10, 20), 10)[0]
    assert _differences(flags | growing, {**flags, "weight_decay": 0.5}, (10, 20), 10) != []
    assert _differences({**flags, "weight_decay": 0.5}, {**flags, "weight_decay": 0.5}, (10, 20), 10) == []


def test_a_constant_weight_decay_is_the_same_in_a_longer_run() -> None:
    """Its length changes nothing; that of one which grows does."""
    saved = {**CURVES, "lr_decay_iters": 10, "weight_decay": 0.5}
    flags = {"lr": 1.0, "lr_decay_iters": 10, "weight_decay": 0.5}
    growing = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.5}
    training = {"train_iters": 20, "global_batch_size": 4}
    checkpoint = {"load": "ckpt"}
    config = config_with(optimizer=flags, training=training, checkpoint=checkpoint)
    assert other_curves(config, Facts(saved=saved)) == []
    config = config_with(optimizer={**flags, **growing}, training=training, checkpoint=checkpoint)
    [told] = other_curves(config, Facts(saved={**saved, **growing}))
    assert ": weight decay 0.0 to 0.5 in 80 samples instead of 0.0 to 0.5 in 40; add" in told
