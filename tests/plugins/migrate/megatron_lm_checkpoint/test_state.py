"""Numbers of a checkpoint of Megatron-LM, as ours."""

import itertools
from argparse import Namespace
from typing import Any

import torch

from megatron_ext.plugins.migrate.megatron_lm_checkpoint import state as megatron_lm

YES_NO = (False, True)


def test_megatron_lms_numbers_become_ours() -> None:
    """No two of them are equal, and what is missing has its own stand-in."""
    for consumed, scheduler, optimizer in itertools.product(YES_NO, YES_NO, (None, "one", "several", "none")):
        args = Namespace(seq_length=16, **({"consumed_train_samples": 40} if consumed else {}))
        common: dict[str, Any] = {"args": args, "iteration": 9}
        if scheduler:
            common["opt_param_scheduler"] = {"num_steps": 24}
        scaler = {"scale": torch.tensor([8.0]), "growth_tracker": 3}
        kinds = {
            "one": {"optimizer": {"state": {"common_step": 6}}, "grad_scaler": scaler},
            "several": [{"param_groups": [{"step": 5}, {"step": torch.tensor(6)}], "grad_scaler": scaler}, {"step": 4}],
            "none": {},
        }
        if optimizer:
            common["optimizer"] = kinds[optimizer]
        read = 40 if consumed else 0
        expected: dict[str, Any] = {
            "iteration": 9,
            "train_state": {
                "iteration": 9,
                "consumed_samples": read,
                "consumed_tokens": 16 * read,
                "scheduled_samples": 24 if scheduler else read,
            },
        }
        if optimizer:
            empty = optimizer == "none"
            expected["optimizer_step"] = 0 if empty else 6
            expected["grad_scaler"] = {} if empty else {"scale": 8.0, "growth_tracker": 3, "of_mean": True}
        assert megatron_lm.as_ours(common) == expected
    for kinds, readable in (
        ((), True), (("fully_reshardable",), True), (("dp_reshardable",), False),
        (("fully_reshardable", "fully_sharded_model_space"), False),
    ):  # fmt: skip
        optimizer = [{"param_state": {"param_state_sharding_type": kind}} for kind in kinds]
        assert megatron_lm.optimizer_is_readable({"optimizer": optimizer}) == readable
    assert megatron_lm.optimizer_is_readable({})
