"""What was found outside of the flags is judged with them: the machine, a checkpoint, files."""

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.device import hardware_queues
from megatron_ext.rules.run_rules import checkpoint_options_have_a_checkpoint
from megatron_ext.rules.validate import problems
from megatron_ext.train.configure import gather_facts
from tests.support.near_bounds import found
from tests.support.wrong_flags import BASE

ROOT = Path(__file__).resolve().parents[3]
_RECURRENCE = (
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --experimental-attention-variant "
    "gated_delta_net --linear-attention-freq 2 --recurrence-kernels fla"
)


def test_facts_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    typed = parse(shlex.split(BASE))
    monkeypatch.setattr(hardware_queues, "_DRIVER_FILES", (ROOT,))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    facts = gather_facts(typed)
    packages = ["apex", "comet_ml", "fla", "mlflow", "trackio", "transformer_engine", "wandb"]
    assert (facts.cuda_available, sorted(facts.packages)) == (True, packages)
    monkeypatch.setattr(hardware_queues, "_DRIVER_FILES", ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    facts = gather_facts(typed)
    assert (facts.cuda_available, facts.packages) == (False, frozenset())


_SAVED = {"num_layers": 8, "hidden_size": 128, "num_attention_heads": 8, "vocab_size": 1000}


def loading(line: str, **saved: Any) -> list[str]:
    """The problems of a run that goes on from a checkpoint with the values of the base launch, but for these."""
    typed = parse(shlex.split(f"{BASE} --load a {line}")).values
    plain = resolve(parse(shlex.split(BASE)).values, Facts())
    every = {
        name: value for group in (plain.model, plain.training, plain.optimizer) for name, value in vars(group).items()
    }
    facts = Facts(saved={**every, **_SAVED, **saved})
    return problems(resolve(typed, facts), facts)


LOADED = [
    ("", {}, []),
    (
        "--num-layers 6",
        {},
        ["--num-layers 6, but the checkpoint in --load was saved with 8; use --num-layers 8"],
    ),
    ("", {"swiglu": True}, ["--swiglu is not given, but the checkpoint in --load was saved with it; add --swiglu"]),
    (
        "--disable-bias-linear",
        {},
        ["--disable-bias-linear is given, but the checkpoint in --load was saved without it; leave "
         "--disable-bias-linear out"],
    ),
    (
        "",
        {"vocab_size": 999},
        ["--vocab-size 1000, but the checkpoint in --load was saved with 999; use --vocab-size 999"],
    ),
    (
        "--disable-bias-linear --num-experts 8 --moe-router-load-balancing-type sinkhorn",
        {"disable_bias_linear": True, "num_experts": 8},
        ["--moe-router-load-balancing-type sinkhorn, but the checkpoint in --load was saved with aux_loss; use "
         "--moe-router-load-balancing-type aux_loss"],
    ),
    (
        "--disable-bias-linear --num-experts 8",
        {"disable_bias_linear": True, "num_experts": 8, "moe_router_load_balancing_type": ("sinkhorn",)},
        ["--moe-router-load-balancing-type aux_loss, but the checkpoint in --load was saved with sinkhorn; use "
         "--moe-router-load-balancing-type sinkhorn"],
    ),
    (
        "--disable-bias-linear --num-experts 8 --moe-router-load-balancing-type sinkhorn",
        {"disable_bias_linear": True, "num_experts": 8, "moe_router_load_balancing_type": ("sinkhorn",)},
        [],
    ),
    (
        "--disable-bias-linear --num-experts 8 --moe-router-load-balancing-type none",
        {"disable_bias_linear": True, "num_experts": 8},
        [],
    ),
    (
        "--disable-bias-linear --num-experts 8 --finetune",
        {"disable_bias_linear": True, "num_experts": 8, "moe_router_load_balancing_type": ("sinkhorn",)},
        [],
    ),
    (
        "--exp-avg-dtype fp16",
        {},
        ["--exp-avg-dtype fp16, but the checkpoint in --load was saved with fp32, and fp16 holds the root of a moment; "
         "use --exp-avg-dtype fp32, or add --no-load-optim to begin Adam's moments anew"],
    ),
    (
        "--exp-avg-sq-dtype bf16",
        {"exp_avg_sq_dtype": "fp16"},
        ["--exp-avg-sq-dtype bf16, but the checkpoint in --load was saved with fp16, and fp16 holds the root of a "
         "moment; use --exp-avg-sq-dtype fp16, or add --no-load-optim to begin Adam's moments anew"],
    ),
    ("--exp-avg-dtype fp16 --no-load-optim", {}, []),
    ("--exp-avg-dtype fp16 --finetune", {}, []),
    ("--exp-avg-dtype bf16", {}, []),
    (
        "--optimizer sgd",
        {"optimizer": "sgd", "sgd_momentum": 0.0},
        ["--sgd-momentum 0.9, but the checkpoint in --load was saved with 0, without the state that it needs; use "
         "--sgd-momentum 0, or add --no-load-optim to begin the optimizer's state anew"],
    ),
    ("--optimizer sgd --no-load-optim", {"optimizer": "sgd", "sgd_momentum": 0.0}, []),
    ("--optimizer sgd --sgd-momentum 0", {"optimizer": "sgd", "sgd_momentum": 0.0}, []),
    ("--optimizer sgd", {"optimizer": "sgd"}, []),
    ("--use-checkpoint-args", {}, []),
]  # fmt: skip


@pytest.mark.parametrize(("line", "saved", "expected"), LOADED, ids=[f"{row[0]} {row[1]}" for row in LOADED])
def test_a_checkpoint_is_compared_with_the_flags(line: str, saved: dict[str, Any], expected: list[str]) -> None:
    assert loading(line, **saved) == expected


def test_a_checkpoint_older_than_a_flag_has_its_default() -> None:
    typed = parse(shlex.split(f"{BASE} --load a")).values
    plain = resolve(parse(shlex.split(BASE)).values, Facts())
    saved = {name: value for name, value in vars(plain.model).items() if name not in ("swiglu", "rotary_interleaved")}
    facts = Facts(saved={**saved, "vocab_size": 1000})
    assert problems(resolve(typed, facts), facts) == []


FOUND = [
    ("", Facts(world_size=1), []),
    (
        "--world-size 8",
        Facts(world_size=4),
        ["--world-size 8, but 4 ranks were started; leave --world-size out, start 8 ranks, or add --dry-run to check "
         "the layout alone"],
    ),
    ("", Facts(vocab_size=1000), []),
    ("", Facts(vocab_size=999), []),
    (
        "",
        Facts(vocab_size=2000),
        ["--vocab-size 1000 is below the tokenizer's 2000 entries; use --vocab-size 2000, or leave it out"],
    ),
    ("--transformer-impl transformer_engine", Facts(packages=frozenset({"transformer_engine"})), []),
    ("--external-kernels apex", Facts(packages=frozenset({"apex"})), []),
    (
        f"{_RECURRENCE} --bf16 --device auto",
        Facts(packages=frozenset({"fla"}), cuda_available=True),
        [],
    ),
    (
        f"{_RECURRENCE} --bf16 --device auto",
        Facts(packages=frozenset({"fla"})),
        ["--recurrence-kernels fla: "],
    ),
    ("--wandb-project a", Facts(packages=frozenset({"wandb"})), []),
    ("--device auto", Facts(cuda_available=True), []),
    ("--device cuda --distributed-backend nccl", Facts(cuda_available=True), []),
    (
        "--device cuda --distributed-backend gloo",
        Facts(cuda_available=True),
        ["--distributed-backend gloo serves CPU processes, but --device is cuda and there is a GPU; use "
         "--distributed-backend nccl, or --device cpu"],
    ),
    (
        "--device auto --distributed-backend nccl",
        Facts(),
        ["--distributed-backend nccl works on GPUs alone, but --device is auto and there is none; use "
         "--distributed-backend gloo"],
    ),
    ("--device auto --record-memory-history --profile", Facts(cuda_available=True), []),
    (
        "--load a --use-checkpoint-args",
        Facts(),
        [],  # the first start of a script: flags describe the model
    ),
    ("--save a --load a --elastic", Facts(global_batch_is_given=True), []),
    (
        "--save a --load b --elastic",
        Facts(global_batch_is_given=True),
        ["--elastic needs one folder "],
    ),
    (
        "",
        Facts(missing_paths=("--train-data-path a", "--sample-prompts b")),
        ["--train-data-path: a does not exist; give the prefix without .bin or .idx, of files that "
         "megatron-ext preprocess wrote", "--sample-prompts: b does not exist; it takes a file with a prompt on each "
         "line: check the path, or write the prompts into one"],
    ),
    ("", Facts(tokenizer_error="no tokenizer", load_problem="no folder"), ["no tokenizer", "no folder"]),
    (
        "--load a",
        Facts(missing_checkpoint="nothing there"),
        ["--load a: nothing there; name a folder that holds a checkpoint, or leave --exit-on-missing-checkpoint out to "
         "start afresh where there is none"],
    ),
    (
        "",
        Facts(eval_tasks_problems=("one", "two"), missing_task_files=("three",), huggingface_problems=("four",)),
        ["one", "two", "three", "four"],
    ),
    (
        "--skip-samples 1",
        Facts(skip_samples_error="7x is no number"),
        ["--skip-samples: 7x is no number; give numbers, ranges as 4096-4159, or files of them, as "
         "SAVE/spike-31/samples.jsonl"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "facts", "expected"), FOUND, ids=[f"{n} {row[0]}" for n, row in enumerate(FOUND)])
def test_what_was_found_outside_of_the_flags_is_judged(line: str, facts: Facts, expected: list[str]) -> None:
    """By the beginnings of the problems: tests/golden/problems.txt has the sentences that flags alone cause."""
    problems_found = found(line, facts)
    assert len(problems_found) == len(expected)
    assert [text.startswith(begin) for text, begin in zip(problems_found, expected, strict=True)] == [True] * len(
        expected
    )


def test_without_a_checkpoint_its_arguments_need_the_flags_of_a_model() -> None:
    line = (
        "--load a --use-checkpoint-args --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1 --train-iters 9"
    )
    config = resolve(parse(line.split()).values, Facts())
    assert list(checkpoint_options_have_a_checkpoint(config, Facts())) == [
        "--use-checkpoint-args takes the model from a checkpoint, but --load a holds none that is whole; give a folder "
        "that has one, or the flags of the model"
    ]
