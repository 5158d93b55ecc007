"""Flags that change nothing next to others, or have a side effect, are told."""

from typing import Any

import pytest

from megatron_ext.config.resolve import Facts
from megatron_ext.rules.warnings import warnings_of
from tests.support.small_models import config_with


@pytest.mark.parametrize(
    ("flags", "typed", "saved", "told"),
    [
        ({}, {}, None, []),
        (
            {"optimizer": {"exp_avg_sq_dtype": "bf16", "adam_beta2": 0.999}},
            {},
            None,
            ["--exp-avg-sq-dtype bf16 with --adam-beta2 0.999"],
        ),
        ({"optimizer": {"exp_avg_sq_dtype": "bf16", "adam_beta2": 0.996}}, {}, None, []),
        ({"optimizer": {"exp_avg_sq_dtype": "fp16", "adam_beta2": 0.999}}, {}, None, []),
        ({"optimizer": {"exp_avg_dtype": "bf16", "adam_beta2": 0.999}}, {}, None, []),
        (
            {"checkpoint": {"use_checkpoint_args": True, "load": "ckpt"}},
            {},
            None,
            ["--use-checkpoint-args changes nothing"],
        ),
        ({"checkpoint": {"use_checkpoint_args": True, "load": "ckpt"}}, {}, {}, []),
        ({"model": {"no_position_embedding": True}}, {}, None, ["--no-position-embedding changes nothing"]),
        (
            {"layout": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}},
            {},
            None,
            ["--attention-dropout 0 with context parallelism"],
        ),
        ({"layout": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}}, {"cp_comm_type": ("a2a",)}, None, []),
        ({"layout": {"context_parallel_size": 2, "cp_comm_type": ("p2p",)}}, {}, None, []),
        ({"layout": {"context_parallel_size": 1, "cp_comm_type": ("a2a",)}}, {}, None, []),
        (
            {"layout": {"device": "cpu"}},
            {"check_before_update": True, "no_triton_kernels": True},
            None,
            [
                "--check-before-update changes nothing here: with --device cpu numbers",
                "--no-triton-kernels changes nothing here: with --device cpu no Triton kernel",
            ],
        ),
        ({"layout": {"device": "cuda"}}, {"check_before_update": True, "no_triton_kernels": True}, None, []),
        ({"layout": {"device": "cpu"}}, {"check_before_update": False}, None, []),
        (
            {"layout": {"tp_comm_overlap": True}, "training": {"fp8_format": "hybrid", "bf16": True}},
            {},
            None,
            ["--tp-comm-overlap changes nothing here: products of --fp8-format hybrid"],
        ),
        (
            {"layout": {"tp_comm_overlap": True}, "model": {"transformer_impl": "transformer_engine"}},
            {"transformer_impl": "transformer_engine"},
            None,
            ["--tp-comm-overlap changes nothing here: with --transformer-impl transformer_engine"],
        ),
        (
            {},
            {"transformer_impl": "transformer_engine"},
            None,
            ["--transformer-impl transformer_engine changes nothing here"],
        ),
        ({"model": {"transformer_impl": "transformer_engine"}}, {"transformer_impl": "transformer_engine"}, None, []),
    ],
)
def test_flags_that_change_nothing_are_told(
    flags: dict[str, dict[str, Any]],
    typed: dict[str, Any],
    saved: dict[str, Any] | None,
    told: list[str],
) -> None:
    found = warnings_of(typed, config_with(**flags), Facts(saved=saved))
    assert [text.startswith(begin) for text, begin in zip(found, told, strict=True)] == [True] * len(told)
