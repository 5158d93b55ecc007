"""What a run says of itself before its first step."""

import dataclasses
from typing import Any

import pytest

from megatron_ext.telemetry.banner import Begun, banner
from tests.support.small_models import LLAMA, small_config


def test_the_banner() -> None:
    config = small_config(
        LLAMA,
        {"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"train_iters": 10},
    )
    begun = Begun("a device", "gloo", iteration=4, consumed_samples=16, own=("loss",), kernels="torch's")
    first, *lines = banner(config, begun).splitlines()
    assert first.startswith("megatron-ext ")
    assert lines == [
        "device  8 ranks on a device, gloo",
        "layout  TP 2 x PP 2 x CP 1 x DP 2",
        "model   155,456 parameters and 768 of vocabulary padding, 4 layers of width 64, fp32",
        "data    synthetic; 4 sequences of 16 tokens a step",
        "to go   384 tokens in 24 sequences after iteration 4",
        "own     loss",
        "kernels torch's",
    ]


def test_every_dropout_that_is_not_0_is_named() -> None:
    both = {"attention_dropout": 0.1, "hidden_dropout": 0.2}
    for rates, words in (
        (both, "0.1 of attention, 0.2 of embeddings and residual branches"),
        ({**both, "attention_dropout": 0.0}, "0.2 of embeddings and residual branches"),
    ):
        config = small_config({**LLAMA, **rates}, {"world_size": 1}, {"train_iters": 10})
        begun = Begun("a device", "gloo", iteration=4, consumed_samples=16)
        assert f"dropout {words}" in banner(config, begun).splitlines()


PP = "pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("layout", "training", "name", "line"),
    [
        ({}, {}, "device", "1 rank on a device, gloo"),
        ({"world_size": 2}, {}, "device", "2 ranks on a device, gloo"),
        ({"world_size": 2}, {}, "layout", "TP 1 x PP 1 x CP 1 x DP 2"),
        ({"world_size": 4, "context_parallel_size": 2}, {}, "layout", "TP 1 x PP 1 x CP 2 x DP 2"),
        (
            {"world_size": 2, PP: 2, "num_virtual_stages_per_pipeline_rank": 2},
            {},
            "layout",
            "TP 1 x PP 2 in 2 chunks x CP 1 x DP 1",
        ),
        ({"world_size": 2, "expert_model_parallel_size": 2}, {}, "layout", "TP 1 x PP 1 x CP 1 x DP 2 x EP 2"),
        ({}, {"bf16": True}, "model", "155,456 parameters and 768 of vocabulary padding, 4 layers of width 64, bf16"),
        ({}, {"fp16": True}, "model", "155,456 parameters and 768 of vocabulary padding, 4 layers of width 64, fp16"),
        ({}, {"train_iters": 5}, "to go", "64 tokens in 4 sequences after iteration 4"),
        ({}, {"train_iters": 4}, "to go", "0 tokens in 0 sequences after iteration 4"),
        ({}, {"train_iters": 3}, "to go", "0 tokens in 0 sequences after iteration 4"),
        ({}, {"train_iters": None, "train_samples": 26}, "to go", "160 tokens in 10 sequences after iteration 4"),
    ],
)
def test_each_line_of_the_banner(layout: dict[str, int], training: dict[str, Any], name: str, line: str) -> None:
    config = small_config(LLAMA, {"world_size": 1} | layout, {"train_iters": 10} | training)
    begun = Begun("a device", "gloo", iteration=4, consumed_samples=16)
    found = {text[:8].rstrip(): text[8:] for text in banner(config, begun).splitlines()[1:]}
    assert found[name] == line
    assert list(found) == ["device", "layout", "model", "data", "to go"], "what there is not is left out"


def test_what_a_run_brings_and_chooses_has_a_line_each() -> None:
    config = small_config(LLAMA, {"world_size": 1}, {"train_iters": 2})
    for given, line in (
        ({"own": ("loss", "layer")}, "own     loss, layer"),
        ({"kernels": "of TE"}, "kernels of TE"),
        ({"attention": "flash"}, "attend  flash"),
    ):
        begun = Begun("a device", "gloo", iteration=0, consumed_samples=0, **given)  # pyright: ignore[reportArgumentType]
        *_, to_go, last = banner(config, begun).splitlines()
        assert (to_go, last) == ("to go   128 tokens in 8 sequences", line)


@pytest.mark.parametrize(
    ("paths", "train_paths", "source"),
    [
        (None, None, "synthetic"),
        (("a",), None, "a"),
        (("a", "b"), None, "a and 1 more"),
        (("0.3", "a", "0.3", "b", "0.4", "c"), None, "a and 2 more"),
        (None, ("d", "e"), "d and 1 more"),
    ],
)
def test_the_data_is_named_by_its_first_source(
    paths: tuple[str, ...] | None, train_paths: tuple[str, ...] | None, source: str
) -> None:
    config = small_config(LLAMA, {"world_size": 1}, {"train_iters": 2})
    data = dataclasses.replace(config.data, data_path=paths, train_data_path=train_paths)
    lines = banner(dataclasses.replace(config, data=data), Begun("a device", "gloo", 0, 0)).splitlines()
    assert f"data    {source}; 4 sequences of 16 tokens a step" in lines
