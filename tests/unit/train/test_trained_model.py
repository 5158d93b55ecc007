"""A trained model for inference: which flags name it, what is taken from its checkpoint, and what is built of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint.native import resume as native
from megatron_ext.errors import ConfigurationError
from megatron_ext.train import trained_model
from megatron_ext.train.configure import Configured
from megatron_ext.train.trained_model import configure_trained, load_trained
from tests.support.small_models import small_config

OF_A_RUN = ["--mock-data", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--eval-interval", "0"]
WEIGHTS_ALONE = ["--use-checkpoint-args", "--finetune", "--no-load-optim", "--no-load-rng"]
NOTHING: Any = None


def _asked(monkeypatch: pytest.MonkeyPatch, argv: list[str], saved: Any = NOTHING, found: bool = True) -> list[str]:
    """The flags that are configured for a command line."""

    def look(values: Any) -> Any:
        assert values["use_checkpoint_args"] is True
        return SimpleNamespace(resume=SimpleNamespace(saved=saved) if found else None)

    asked: list[list[str]] = []
    monkeypatch.setattr(native, "look", look)
    monkeypatch.setattr(trained_model, "configure", lambda flags: asked.append(list(flags)))
    configure_trained(argv)
    [flags] = asked
    assert flags[: len(OF_A_RUN) + len(argv)] == [*OF_A_RUN, *argv]
    return flags[len(OF_A_RUN) + len(argv) :]


@pytest.mark.parametrize("argv", [[], ["--load", "ckpt", "--load-hf", "folder"], ["--tensor-model-parallel-size", "2"]])
def test_one_model_is_named(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"^give a model with --load CHECKPOINT or --load-hf FOLDER, one of"):
        _asked(monkeypatch, argv, {})


def test_a_folder_without_a_checkpoint_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"^--load ckpt holds no checkpoint; name a folder that --save wrote$"):
        _asked(monkeypatch, ["--load", "ckpt"], found=False)


SAVED = {"seq_length": 48, "max_position_embeddings": 64, "bf16": True, "fp16": False}


@pytest.mark.parametrize(
    ("argv", "saved", "taken"),
    [
        ([], None, []),
        ([], {}, []),
        ([], SAVED, ["--seq-length", "48", "--max-position-embeddings", "64", "--bf16"]),
        (
            [],
            {**SAVED, "bf16": False, "fp16": True},
            ["--seq-length", "48", "--max-position-embeddings", "64", "--fp16"],
        ),
        (["--fp16"], SAVED, ["--seq-length", "48", "--max-position-embeddings", "64"]),
        (["--bf16"], {**SAVED, "bf16": False, "fp16": True}, ["--seq-length", "48", "--max-position-embeddings", "64"]),
        (["--seq-length", "8"], SAVED, ["--max-position-embeddings", "64", "--bf16"]),
        (["--seq-length", "8"], {**SAVED, "position_embedding_type": "rope"}, ["--bf16"]),
        (
            ["--max-position-embeddings", "96"],
            {**SAVED, "position_embedding_type": "rope"},
            ["--seq-length", "48", "--bf16"],
        ),
        (
            [],
            {**SAVED, "position_embedding_type": "rope"},
            ["--seq-length", "48", "--max-position-embeddings", "64", "--bf16"],
        ),
    ],
)
def test_what_inference_takes_from_the_checkpoint(
    argv: list[str], saved: dict[str, Any] | None, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run may change, unless it is given; one precision excludes the other. Rotary positions have no table, so
    that another length needs no other promise."""
    assert _asked(monkeypatch, ["--load", "ckpt", *argv], saved) == [*WEIGHTS_ALONE, *taken]


@pytest.mark.parametrize(
    ("argv", "added"),
    [
        ([], []),
        (["--tensor-model-parallel-size", "1"], []),
        (["--tensor-model-parallel-size", "2"], ["--sequence-parallel"]),
        (["--tensor-model-parallel-size", "4"], ["--sequence-parallel"]),
        (["--tensor-model-parallel-size", "2", "--sequence-parallel"], []),
        (["--tensor-model-parallel-size", "2", "--sequence-parallel=false"], []),
    ],
)
def test_the_rules_of_the_training_have_what_they_ask_for(
    argv: list[str], added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _asked(monkeypatch, ["--load", "ckpt", *argv], {}) == [*added, *WEIGHTS_ALONE]


@pytest.mark.parametrize(
    ("longest", "argv", "tokenizer", "added"),
    [
        (512, [], False, ["--seq-length", "512"]),
        (2048, [], False, ["--seq-length", "2048"]),
        (4096, [], False, ["--seq-length", "2048"]),
        (None, [], False, ["--seq-length", "2048"]),
        (512, ["--seq-length", "9"], False, []),
        (
            512,
            [],
            True,
            ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "FOLDER", "--seq-length", "512"],
        ),
        (512, ["--tokenizer-type", "NullTokenizer"], True, ["--seq-length", "512"]),
    ],
)
def test_a_hugging_face_folder_gives_tokenizer_and_length(
    longest: int | None,
    argv: list[str],
    tokenizer: bool,
    added: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from megatron_ext.families import hf_config

    values = {} if longest is None else {"max_position_embeddings": longest}
    monkeypatch.setattr(hf_config, "read_hf_config", lambda folder: ("family", values))
    if tokenizer:
        (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    found = _asked(monkeypatch, ["--load-hf", str(tmp_path), *argv])
    assert found == [str(tmp_path) if word == "FOLDER" else word for word in added]


def test_what_only_training_does_is_left_out() -> None:
    layout = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "world_size": 4,
        "sequence_parallel": True,
        "num_virtual_stages_per_pipeline_rank": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
    }
    config = small_config(layout=layout, model={"transformer_impl": "transformer_engine"})
    found = trained_model._for_inference(config)
    assert (found.layout.sequence_parallel, found.layout.virtual_pipeline_model_parallel_size) == (False, 1)
    assert (found.layout.tensor_model_parallel_size, found.layout.pipeline_model_parallel_size) == (2, 2)
    assert found.model.transformer_impl == "local"
    assert found.training == config.training


@pytest.mark.parametrize("source", ["load", "load_hf"])
def test_a_model_is_built_and_its_weights_alone_are_loaded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks evaluate and need no gradients; the layout that the ranks agreed on is the one that is built."""
    import dataclasses

    from megatron.core.pipeline_parallel import p2p_communication

    from megatron_ext.checkpoint.huggingface import load as huggingface
    from megatron_ext.checkpoint.native import agreement, load
    from megatron_ext.inference import model as inference
    from megatron_ext.model import config as engine
    from megatron_ext.model import gpt
    from megatron_ext.parallel import groups
    from megatron_ext.train import build

    heard: list[Any] = []

    class Chunk:
        def eval(self) -> Any:
            heard.append("evaluates")
            return self

        def requires_grad_(self, requires: bool) -> None:
            heard.append(requires)

    config = small_config(
        layout={"device": "cpu", "sequence_parallel": True, "tensor_model_parallel_size": 2, "world_size": 2}
    )
    checkpoint = {"load": "ckpt"} if source == "load" else {"load_hf": "folder"}
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **checkpoint))
    agreed = dataclasses.replace(config, training=dataclasses.replace(config.training, seed=77))
    here, collection, core = SimpleNamespace(kind="cpu"), SimpleNamespace(pp="stages"), "core"
    chunks = [Chunk(), Chunk()]

    def install(device: str, *, fuses: bool) -> Any:
        heard.append((device, fuses))
        return here

    monkeypatch.setattr(trained_model.device, "install", install)
    monkeypatch.setattr(groups, "start", lambda layout, device: heard.append(("start", device)))
    monkeypatch.setattr(
        groups, "initialize", lambda layout, device: heard.append(layout.sequence_parallel) or collection
    )
    monkeypatch.setattr(agreement, "agree", lambda search, flags: SimpleNamespace(iteration=9, search=search))
    monkeypatch.setattr(
        trained_model,
        "configure_for",
        lambda configured, found: dataclasses.replace(configured, config=agreed, resume=found),
    )
    monkeypatch.setattr(build, "set_kernels", lambda config, device: heard.append(("kernels", config.training.seed)))
    monkeypatch.setattr(engine, "transformer_config", lambda config, kind: core)
    monkeypatch.setattr(gpt, "build_model", lambda config, given, groups: chunks if given == core else None)
    monkeypatch.setattr(p2p_communication, "P2PCommunicator", lambda pp_group, config: (pp_group, config))
    monkeypatch.setattr(load, "load_found", lambda weights, resume: heard.append((weights.chunks, resume.search)))
    monkeypatch.setattr(huggingface, "load_huggingface", lambda weights, folder: heard.append((weights.chunks, folder)))
    monkeypatch.setattr(inference, "Model", lambda *given, **named: (given, named))
    typed: Any = SimpleNamespace(values={})
    search: Any = "search" if source == "load" else None
    given, named = load_trained(Configured(config, typed, typed, search, None))  # pyright: ignore[reportGeneralTypeIssues]
    expected = trained_model._for_inference(agreed if source == "load" else config)
    assert given == (expected, here, collection, ("stages", core), chunks, None)
    assert named == {"iteration": 9 if source == "load" else None}
    assert heard == [
        ("cpu", False),
        ("start", here),
        False,
        ("kernels", expected.training.seed),
        (chunks, "search" if source == "load" else "folder"),
        *["evaluates", False] * 2,
    ]


@pytest.mark.parametrize("asked", [None, "NullTokenizer"])
def test_ids_alone_have_no_tokenizer(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    config = small_config()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_type=asked))
    monkeypatch.setattr(trained_model, "tokenizer_from_flags", lambda flags: ("tokenizer of", flags.tokenizer_type))
    assert trained_model.tokenizer_of(config) == (None if asked is None else ("tokenizer of", asked))
