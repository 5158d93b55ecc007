"""A file that the flags name and that cannot be read is the one problem: what follows from it is not said."""

import json
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.train.configure import configure

RUN = "--seq-length 8 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --device cpu"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 10,
    "max_position_embeddings": 32,
}


def _problems(flags: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        configure(flags.split())
    return caught.value.problems


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"rope_scaling": {"type": "ntk", "factor": 4.0}},
            'rope_scaling: rope_type is "ntk"; only default, linear, ',
        ),
        ({"model_type": "bert"}, 'model_type "bert" is not supported'),
        ({"logit_scale": 2.0}, "logit_scale is 2.0, a key that is not known for llama"),
        ({"vocab_size": 10**16}, "vocab_size is 10000000000000000, above 1000000000000000"),
    ],
)
def test_a_refused_config_json_is_the_one_problem(changes: dict, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    [problem] = _problems(f"{RUN} --load-hf {tmp_path}")
    assert problem.startswith(f"--load-hf {tmp_path}/config.json: {reason}")
    # Another mistake is still said, and so is a flag of the model that was typed and is wrong by itself.
    found = _problems(f"{RUN} --load-hf {tmp_path} --min-lr 1 --num-layers 0")
    assert sorted(one.partition(" ")[0] for one in found) == ["--load-hf", "--min-lr", "--num-layers"]


def test_without_a_config_json_that_is_said_alone(tmp_path: Path) -> None:
    [problem] = _problems(f"{RUN} --load-hf {tmp_path} --world-size 1 --swiglu")
    assert problem.startswith(f"--load-hf {tmp_path}/config.json: No such file")


def test_a_missing_configuration_file_is_the_one_problem(tmp_path: Path) -> None:
    [problem] = _problems(f"--config {tmp_path}/none.yaml")
    assert problem.startswith(f"--config {tmp_path}/none.yaml: No such file or directory")
    # Values on the command line are judged as ever.
    found = _problems(f"--config {tmp_path}/none.yaml --num-layers 0")
    assert [one.partition(" ")[0] for one in found] == ["--config", "--num-layers"]


def test_a_checkpoint_that_is_not_there_gives_no_model(tmp_path: Path) -> None:
    [problem] = _problems(f"{RUN} --use-checkpoint-args --load {tmp_path}")
    assert problem.startswith("--use-checkpoint-args ")
    [problem] = _problems(f"{RUN} --use-checkpoint-args")
    assert problem.startswith("--use-checkpoint-args ")
    # The first start of a script that goes on from the folder: flags give the model, and one of them is missing.
    found = _problems(f"{RUN} --use-checkpoint-args --load {tmp_path} --num-layers 2 --hidden-size 16 --vocab-size 9")
    assert found == ["missing: --num-attention-heads; for example --num-attention-heads 12"]
