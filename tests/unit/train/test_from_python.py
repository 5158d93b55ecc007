"""`from megatron_ext import pretrain`: what it takes, returns and raises, and that it is light to import."""

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ext
from megatron_ext import convert, pretrain
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.llama import LLAMA
from megatron_ext.registry import functions, load
from megatron_ext.untrusted.metrics_rows import HAS_ITERATION, read_lines

ROOT = Path(__file__).resolve().parents[3]
RUN: dict[str, Any] = {
    "device": "cpu",
    "mock_data": True,
    "vocab_size": 64,
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "position_embedding_type": "rope",
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 4,
    "lr": 1e-2,
    "eval_interval": 2,
    "eval_iters": 1,
    "log_interval": 2,
    "num_workers": 0,
}


class HeavyBall(torch.optim.Optimizer):
    """Momentum, smaller with each update, by a count that is a number of Python."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weights in (one for one in group["params"] if one.grad is not None):
                state = self.state[weights]
                if not state:
                    state |= {"step": 0, "velocity": torch.zeros_like(weights)}
                state["step"] += 1
                state["velocity"].mul_(group["momentum"]).add_(weights.grad)
                weights.sub_(state["velocity"], alpha=group["lr"] * (0.5 + 0.7 ** state["step"]))


def test_importing_the_package_and_its_names_is_light() -> None:
    program = (
        "import sys, megatron_ext\n"
        "assert {'pretrain', 'evaluate', 'generate', 'convert', 'plan'} <= set(dir(megatron_ext))\n"
        "assert not {'torch', 'numpy', 'megatron_ext.train.pretrain'} & sys.modules.keys()\n"
        "from megatron_ext import environment\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    for name, place in functions().items():
        assert getattr(megatron_ext, name) is load(place)
        assert (load(place).__doc__ or "").count("\n") > 5
    with pytest.raises(AttributeError, match="has no attribute 'train_model'"):
        megatron_ext.train_model  # noqa: B018


def test_a_run_returns_its_history_and_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = pretrain(RUN, save=tmp_path, save_interval=4)
    rows = [line.row or {} for line in read_lines(tmp_path / "metrics.jsonl", HAS_ITERATION)]
    assert list(trained.history) == rows
    assert [row["iteration"] for row in rows if "lm_loss" in row] == [1, 2, 4]
    assert trained.save == tmp_path
    [model] = trained.model
    assert model(torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None], None).shape[:2] == (1, 3)
    assert "iteration        4/       4" in capsys.readouterr().out


def test_an_own_class_resumes_to_the_bit(tmp_path: Path) -> None:
    """Its count is a number of Python again, and not a tensor of fewer digits."""
    own = functools.partial(HeavyBall, momentum=0.8)
    whole = pretrain(RUN, optimizer=own, eval_interval=0)
    first = pretrain(RUN, optimizer=own, eval_interval=0, save=tmp_path, exit_interval=2)
    rest = pretrain(RUN, optimizer=own, eval_interval=0, save=tmp_path, load=tmp_path)
    assert first.losses + rest.losses == whole.losses
    assert whole.losses != pretrain(RUN, eval_interval=0).losses


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_layer": 2}, "unknown flag --num-layer; did you mean --num-layers?"),
        ({"optimizer": "adan"}, "--optimizer: 'adan' is not one of adam, sgd"),
        ({"learning_rate": 1e-3}, "learning_rate=0.001 is a number: lr=0.001 sets the rate"),
        ({"dry_run": True}, "--dry-run trains nothing: use megatron_ext.plan"),
        ({"loss": 3}, "loss= is int: give a function"),
        ({"los": print}, "unknown argument los=, which is given a builtin_function_or_method; did you mean loss=?"),
        ({"callback": [print]}, "unknown argument callback=, which is given a list; did you mean callbacks=?"),
        (
            {"mixer": print},
            "unknown argument mixer=, which is given a builtin_function_or_method; objects are taken by",
        ),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "optimizer= is an object of SGD, which has weights already"),
        ({"optimizer": torch.optim.Adafactor}, "optimizer=Adafactor cannot be divided over ranks"),
    ],
)
def test_what_is_wrong_is_raised(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        pretrain(RUN, **wrong)
    assert str(caught.value).startswith(said)


def test_a_weight_decay_that_a_class_does_not_read_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(RUN, optimizer=HeavyBall, weight_decay=0.1, train_iters=1, eval_interval=0)
    assert "--weight-decay 0.1 changes nothing here: HeavyBall has no weight_decay" in capsys.readouterr().err


def test_a_family_of_ones_own_is_written_and_read(tmp_path: Path) -> None:
    shape = {
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    }
    mine = replace(LLAMA, model_type="my_llama", architecture="MyLlamaForCausalLM")
    plain = {**RUN, "hidden_dropout": 0, "attention_dropout": 0}
    model, run = {**plain, **shape, "hf_model_type": "my_llama"}, str(tmp_path / "run")
    pretrain(model, save=run, save_interval=4, families=[mine])
    folder = convert("to-hf", load=run, save=str(tmp_path / "hf"), no_verify=True, families=[mine])
    described = json.loads((folder / "config.json").read_text())
    assert (described["model_type"], described["architectures"]) == ("my_llama", ["MyLlamaForCausalLM"])
    # The same weights, and the same first batch.
    read = pretrain(plain, load_hf=str(folder), families=[mine])
    assert read.losses[0] == pretrain(model, load=run, finetune=True, families=[mine]).losses[0]
    with pytest.raises(ConfigurationError, match="my_llama"):
        pretrain(plain, load_hf=str(folder))
    with pytest.raises(ConfigurationError, match="families= has 'llama', which is no Family"):
        pretrain(model, families=["llama"])
