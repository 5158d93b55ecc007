"""A trained model for inference: which flags name it, what is taken from its checkpoint, and what is built of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.derived.pipeline_split import layer_counts
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.parallel import groups
from megatron_ext.plugins.tasks import trained_model
from megatron_ext.plugins.tasks.generation import generate
from megatron_ext.plugins.tasks.sampling import Sampling
from megatron_ext.plugins.tasks.trained_model import configure_trained, load_trained
from megatron_ext.train.pretrain import pretrain
from tests.support.small_models import small_config
from tests.support.small_runs import MODEL

LONGER = ["--max-position-embeddings", "64", "--eval-iters", "0"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with rotary positions, computed in bf16."""
    folder = tmp_path_factory.mktemp("saved")
    pretrain([*MODEL, *LONGER, "--bf16", "--save", str(folder)])
    return folder


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with learned positions, computed in fp32."""
    folder = tmp_path_factory.mktemp("learned")
    pretrain([*MODEL, *LONGER, "--position-embedding-type", "learned_absolute", "--save", str(folder)])
    return folder


def _config(folder: Path, *flags: str) -> Config:
    return configure_trained(["--load", str(folder), "--device", "cpu", *flags]).config


def test_a_misspelled_source_is_named_with_the_flag_that_was_meant() -> None:
    with pytest.raises(ConfigurationError) as caught:
        configure_trained(["--laod", "ckpt", "--device", "cpu"])
    unknown, asked = caught.value.problems
    assert unknown == "unknown flag --laod; did you mean --load?"
    assert asked == "give a model with --load CHECKPOINT or --load-hf FOLDER, one of them"


@pytest.mark.parametrize("argv", [[], ["--load", "ckpt", "--load-hf", "folder"], ["--tensor-model-parallel-size", "2"]])
def test_one_model_is_named(argv: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"^give a model with --load CHECKPOINT or --load-hf FOLDER, one of"):
        configure_trained(argv)


def test_a_folder_without_a_checkpoint_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no checkpoint; name a folder that --save wrote$"):
        configure_trained(["--load", str(tmp_path)])


@pytest.mark.parametrize(
    ("flags", "length", "longest", "precision"),
    [
        ([], 16, 64, (True, False)),
        (["--fp16"], 16, 64, (False, True)),
        (["--bf16"], 16, 64, (True, False)),
        (["--seq-length", "96"], 96, 96, (True, False)),
        (["--max-position-embeddings", "96"], 16, 96, (True, False)),
    ],
)
def test_what_inference_takes_from_the_checkpoint(
    flags: list[str], length: int, longest: int, precision: tuple[bool, bool], saved: Path
) -> None:
    """What a run may change, unless it is given; one precision excludes the other. Rotary positions have no table, so
    that another length needs no other promise."""
    config = _config(saved, *flags)
    assert (config.model.seq_length, config.model.max_position_embeddings) == (length, longest)
    assert (config.training.bf16, config.training.fp16) == precision


def test_learned_positions_stay_as_many_as_there_are(learned: Path) -> None:
    config = _config(learned, "--seq-length", "8")
    assert (config.model.seq_length, config.model.max_position_embeddings) == (8, 64)
    assert (config.training.bf16, config.training.fp16) == (False, False)


def test_the_rules_of_the_training_have_what_they_ask_for(saved: Path) -> None:
    """Tensor parallelism of experts needs --sequence-parallel in a training; inference does without."""
    assert not _config(saved).layout.sequence_parallel
    two = ["--dry-run", "--world-size", "2", "--tensor-model-parallel-size", "2"]
    assert _config(saved, *two).layout.sequence_parallel
    assert not _config(saved, *two, "--sequence-parallel=false").layout.sequence_parallel


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 10,
}


@pytest.mark.parametrize(
    ("longest", "flags", "length"), [(512, [], 512), (4096, [], 2048), (512, ["--seq-length", "9"], 9)]
)
def test_a_hugging_face_folder_gives_the_length(longest: int, flags: list[str], length: int, tmp_path: Path) -> None:
    """A long one is given at most 2048 positions at once, unless --seq-length says so."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": longest}))
    found = configure_trained(["--load-hf", str(tmp_path), "--device", "cpu", *flags])
    assert found.config.model.seq_length == length
    assert found.config.data.tokenizer_type is None


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
    found = trained_model._for_inference(config, depths=False)
    assert (found.layout.sequence_parallel, found.layout.virtual_pipeline_model_parallel_size) == (False, 1)
    assert (found.layout.tensor_model_parallel_size, found.layout.pipeline_model_parallel_size) == (2, 2)
    assert found.model.transformer_impl == "local"
    assert found.training == config.training


def test_stages_of_named_chunks_have_one_each() -> None:
    named = {"pipeline_model_parallel_layout": "Et|t|tt|tmL", "num_virtual_stages_per_pipeline_rank": 2}
    layout = {"pipeline_model_parallel_size": 2, "world_size": 2, **named}
    config = small_config(layout=layout, model={"num_layers": 5, "mtp_num_layers": 1})
    for depths, expected in ((False, "Ett|tttL"), (True, "Ett|tttmL")):
        found = trained_model._for_inference(config, depths=depths)
        assert found.layout.pipeline_model_parallel_layout == expected
        assert layer_counts(found) == [[2], [3]]


def test_a_model_is_loaded_without_what_predicts_further_tokens(tmp_path: Path) -> None:
    """By plain inference, and within the training that has it."""
    prompts, saved = tmp_path / "prompts.txt", tmp_path / "saved"
    prompts.write_text("def main(\n")
    flags = [*MODEL, "--tokenizer-type", "ByteTokenizer", "--vocab-size", "257", "--mtp-num-layers", "2"]
    sampling = ["--sample-interval", "3", "--sample-prompts", str(prompts)]
    trained = pretrain([*flags, *sampling, "--save", str(saved)], returns_model=True)
    rows = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    [sampled] = [row["samples"] for row in rows if "samples" in row]
    expected = {name: weight.detach().clone() for name, weight in trained.model[0].named_parameters()}
    model = load_trained(["--load", str(saved), "--device", "cpu"])
    try:
        [again] = generate(model, [list(b"def main(")], Sampling(max_new_tokens=32))
        assert (again.text, sampled[0]["prompt"]) == (sampled[0]["text"], "def main(")
        found = dict(model.chunks[0].named_parameters())
        assert found.keys() == {name for name in expected if not name.startswith("mtp.")}
        assert all(torch.equal(found[name], expected[name]) for name in found)
    finally:
        groups.destroy()


def test_the_model_of_a_checkpoint_has_its_weights_and_evaluates(learned: Path) -> None:
    """Dropout is off, and no weight needs a gradient; ids alone have no tokenizer."""
    trained = pretrain(
        [*MODEL, *LONGER, "--position-embedding-type", "learned_absolute", "--load", str(learned)], returns_model=True
    )
    expected = {name: weight.detach().clone() for name, weight in trained.model[0].named_parameters()}
    model = load_trained(["--load", str(learned), "--device", "cpu"])
    try:
        assert model.iteration == 3
        assert model.tokenizer is None
        [chunk] = model.chunks
        assert not chunk.training
        assert not any(module.training for module in chunk.modules())
        found = dict(chunk.named_parameters())
        assert not any(weight.requires_grad for weight in found.values())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    finally:
        groups.destroy()
