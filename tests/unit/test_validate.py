"""Every rule speaks where it should, names flags and values, and proposes a setting that works."""

import ast
import importlib.util
import json
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.blend import Blend, read_blend
from megatron_ext.config.options import options_by_name
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.device import hardware_queues
from megatron_ext.rules.validate import RULES, problems
from megatron_ext.train.configure import configure, gather_facts
from tests.support.errors_page import answers, errors_page
from tests.support.wrong_flags import BASE, EXAMPLES, SEVERAL

ROOT = Path(__file__).resolve().parents[2]


def found(line: str, facts: Facts | None = None) -> list[str]:
    facts = facts or Facts()
    return problems(resolve(parse(shlex.split(f"{BASE} {line}")).values, facts), facts)


def test_the_base_launch_has_no_problem():
    assert found("") == answers("") == []


@pytest.mark.parametrize("title", EXAMPLES)
def test_a_wrong_flag_is_named_and_what_the_message_says_puts_it_right(title: str, tmp_path: Path):
    wrong, right = EXAMPLES[title]
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    assert answers(wrong) != []
    assert answers(f"{wrong} {right.replace('EXISTING', str(tmp_path / 'corpus'))}") == []


def test_the_page_of_errors_is_what_the_program_says():
    assert errors_page() == (ROOT / "docs/errors.md").read_text(), "python tests/golden/regenerate.py"


def test_the_page_of_errors_is_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch):
    """With GPUs, with every package, without a compiler, under a launcher."""
    monkeypatch.setattr(hardware_queues, "_DRIVER_FILES", (ROOT,))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert errors_page() == (ROOT / "docs/errors.md").read_text()


def test_facts_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    typed = parse(shlex.split(BASE))
    monkeypatch.setattr(hardware_queues, "_DRIVER_FILES", (ROOT,))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    facts = gather_facts(typed)
    packages = ["apex", "comet_ml", "mlflow", "trackio", "transformer_engine", "wandb"]
    assert (facts.cuda_available, sorted(facts.packages)) == (True, packages)
    monkeypatch.setattr(hardware_queues, "_DRIVER_FILES", ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    facts = gather_facts(typed)
    assert (facts.cuda_available, facts.packages) == (False, frozenset())


_PP2 = "--world-size 2 --pipeline-model-parallel-size 2"
WRONG = [
    ("--validation-set-names a b", "add that switch"),
    (
        "--mock-data=false --tokenizer-type ByteTokenizer --train-data-path a --valid-data-path b c "
        "--multiple-validation-sets --validation-set-names x",
        "must be 2 different names",
    ),
    # flags, and words that the one problem must have
    ("--num-layers 0", "--num-layers 0 is below 1"),
    ("--hidden-size=-8", "--hidden-size -8 is below 1"),
    ("--attention-dropout 1", "--attention-dropout 1 is not at least 0 and below 1"),
    ("--norm-epsilon 0", "--norm-epsilon 0 is not above 0"),
    ("--clip-grad=-1", "--clip-grad -1 is below 0"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0 is below 1"),
    ("--hidden-size 100 --num-attention-heads 8", "use --hidden-size 96 or 104, or give the size of one head"),
    ("--num-query-groups 2", "no effect without --group-query-attention"),
    ("--group-query-attention --num-query-groups 3", "use --num-query-groups 1, 2, 4 or 8"),
    ("--position-embedding-type rope --kv-channels 15", "they turn in pairs; use --kv-channels 16"),
    ("--position-embedding-type rope --rotary-percent 0", "--rotary-percent 0 is not above 0 and at most 1"),
    ("--use-rope-scaling", "use --position-embedding-type rope"),
    (
        "--use-rope-scaling --position-embedding-type rope --rope-scaling-low-freq-factor 4",
        "--rope-scaling-low-freq-factor 4 is not below --rope-scaling-high-freq-factor 4; use 1 and 4",
    ),
    ("--no-position-embedding", "--position-embedding-type learned_absolute is refused, as by Megatron"),
    ("--no-position-embedding --position-embedding-type none", "leave it out and use --position-embedding-type none"),
    ("--world-size 2 --tensor-model-parallel-size 2 --ffn-hidden-size 511", "use --ffn-hidden-size 510 or 512"),
    ("--cp-comm-type ring", "--cp-comm-type ring is not one of p2p, all_gather, a2a"),
    ("--cp-comm-type p2p a2a", "names 2 exchanges, but it takes one for all layers or one for each of --num-layers 8"),
    (
        "--world-size 2 --context-parallel-size 2 --attention-dropout 0 --reset-attention-mask --cp-comm-type "
        "a2a a2a a2a a2a all_gather all_gather all_gather all_gather",
        "not for several",
    ),
    (
        "--world-size 6 --context-parallel-size 4 --attention-dropout 0",
        "--context-parallel-size 4 x --pipeline-model-parallel-size 1 = 4",
    ),
    (
        "--world-size 8 --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 --seq-length 36 "
        "--cp-comm-type a2a",
        "use --seq-length 32 or 40",
    ),
    ("--use-distributed-optimizer --optimizer sgd", "use --optimizer adam"),
    (
        "--torch-compile --world-size 2 --tensor-model-parallel-size 2 --hidden-dropout 0.1 --attention-dropout 0",
        "use --hidden-dropout 0 --attention-dropout 0",
    ),
    ("--swiglu --squared-relu", "--swiglu and --squared-relu name different activations"),
    ("--max-position-embeddings 32", "use --max-position-embeddings 64"),
    ("--padded-vocab-size 999", "must be at least the vocabulary's 1000"),
    ("--transformer-impl transformer_engine", "use --transformer-impl local"),
    ("--num-layers 8 --world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 2"
     " --num-virtual-stages-per-pipeline-rank 3", "use --num-virtual-stages-per-pipeline-rank 1, 2 or 4"),
    ("--world-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
     "use --num-layers-per-virtual-pipeline-stage 1, 2 or 4"),
    ("--world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 2 --num-layers-per-virtual-pipeline-stage 2 "
     "--num-virtual-stages-per-pipeline-rank 4", "disagree: a stage has 4 layers"),
    ("--world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 3 --num-virtual-stages-per-pipeline-rank 2",
     "use --global-batch-size 2 or 4"),
    ("--world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 2 --num-virtual-stages-per-pipeline-rank 2 "
     "--no-overlap-p2p-communication", "leave --no-overlap-p2p-communication out"),
    (f"{_PP2} --num-layers 9", "use --num-layers 8 or 10, or --pipeline-model-parallel-size 1, or stages that differ: "
     "--account-for-embedding-in-pipeline-split or --decoder-first-pipeline-num-layers 4"),
    (f"{_PP2} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --global-batch-size 2 "
     "--num-virtual-stages-per-pipeline-rank 2", "does not divide the 5 layers of a stage"),
    ("--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear --num-experts 8 "
     "--expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 63",
     "--moe-shared-expert-intermediate-size 63 is not divisible by --tensor-model-parallel-size 2"),
    (f"{_PP2} --account-for-loss-in-pipeline-split",
     "--num-layers 8 + 1 (--account-for-loss-in-pipeline-split) is not divisible"),
    (f"{_PP2} --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4",
     "use --decoder-last-pipeline-num-layers 5"),
    ("--decoder-first-pipeline-num-layers 8", "--pipeline-model-parallel-size is 1; leave it out"),
    (f"{_PP2} --decoder-first-pipeline-num-layers 8", "use --decoder-first-pipeline-num-layers 4"),
    (f"{_PP2} --decoder-first-pipeline-num-layers 0", "is below 1"),
    (f"{_PP2} --decoder-first-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 2",
     "use --num-virtual-stages-per-pipeline-rank"),
    (f"{_PP2} --decoder-first-pipeline-num-layers 3 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2",
     "does not divide the 3 or 5 layers of a stage"),
    (f"{_PP2} --pipeline-model-parallel-layout Et*8|L --num-layers-per-virtual-pipeline-stage 2",
     "give the layout alone"),
    (f"{_PP2} --pipeline-model-parallel-layout Et*4|x*4L", "'x' is none of E, t, L"),
    (f"{_PP2} --pipeline-model-parallel-layout Et*4|t*4mL", "multi-token prediction"),
    (f"{_PP2} --pipeline-model-parallel-layout t*4E|t*4L", "must begin with its only E and end with its only L"),
    (f"{_PP2} --pipeline-model-parallel-layout Et*4||t*4|L --global-batch-size 2", "chunk 2 of 4 holds nothing"),
    (f"{_PP2} --pipeline-model-parallel-layout Et*(99999999)|L", "'*' is none of"),
    (f"{_PP2} --pipeline-model-parallel-layout E(t*999)*999|L", "more than 100000 layers"),
    (f"{_PP2} --pipeline-model-parallel-layout Et*4|t|t*3|L --num-virtual-stages-per-pipeline-rank 3 "
     "--global-batch-size 2", "leave --num-virtual-stages-per-pipeline-rank out"),
    (f"{_PP2} --microbatch-group-size-per-virtual-pipeline-stage 2", "belongs to interleaved stages"),
    (f"{_PP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2 "
     "--microbatch-group-size-per-virtual-pipeline-stage 1", "stage 2 or more"),
    ("--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 63", "use --seq-length 62 or 64"),
    ("--overlap-param-gather --use-distributed-optimizer", "add --overlap-grad-reduce"),
    ("--overlap-param-gather", "needs --use-distributed-optimizer and --overlap-grad-reduce"),
    ("--distributed-backend nccl", "use --distributed-backend gloo"),
    ("--device cuda", "use --device cpu"),
    ("--distributed-timeout-minutes 0", "use --distributed-timeout-minutes 10"),
    ("--world-size 4 --eval-global-batch-size 6", "use --eval-global-batch-size 4 or 8"),
    ("--train-samples 5", "both give the length of the run"),
    ("--global-batch-size 16 --rampup-batch-size 4 5 100", "16 - 4 = 12 is not divisible by the increment 5"),
    ("--global-batch-size 16 --rampup-batch-size 16 4 100", "starts at 16, not below --global-batch-size 16"),
    ("--global-batch-size 16 --rampup-batch-size 4 4", "must be three positive integers"),
    ("--world-size 2 --global-batch-size 16 --rampup-batch-size 3 13 100", "use multiples of 2"),
    ("--world-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8 "
     "--rampup-batch-size 1 1 100", "use multiples of 2"),
    ("--loss-scale 0", "leave it out for a dynamic scale"),
    ("--min-loss-scale 8 --initial-loss-scale 4", "use --min-loss-scale 1"),
    ("--recompute-granularity full", "add --recompute-method uniform --recompute-num-layers 1"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 9", "use 1 to 8"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-activations",
     "--recompute-activations means selective"),
    ("--world-size 2 --use-torch-fsdp2 --log-straggler --log-communication-share",
     "--log-communication-share and --log-straggler time collectives and waits for them"),
    ("--world-size 2 --use-torch-fsdp2 --check-weight-hash-across-dp-replicas-interval 5",
     "use --check-weight-hash-across-dp-replicas-interval 0"),
    ("--recompute-modules mlp", "belongs to --recompute-granularity selective"),
    ("--recompute-granularity selective --recompute-modules mlp rotary", "rotary cannot be recomputed by itself"),
    ("--recompute-granularity selective --recompute-modules layernorm --torch-compile --hidden-dropout 0 "
     "--attention-dropout 0", "leave one of the two out"),
    ("--recompute-granularity selective --recompute-num-layers 1", "belong to --recompute-granularity full"),
    ("--min-lr 1", "--min-lr 1 must be at least 0 and at most --lr 0.001"),
    ("--lr-warmup-init 1", "use --lr-warmup-init 0"),
    ("--lr-decay-samples 100", "use --lr-decay-iters"),
    ("--lr-warmup-iters 100", "does not end before the run's end (--train-iters 100)"),
    ("--lr-warmup-iters 50 --lr-decay-iters 20", "does not end before --lr-decay-iters 20"),
    ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", "both give the warmup"),
    ("--lr-warmup-fraction 1.5", "use --lr-warmup-fraction 0.1"),
    ("--lr-decay-style WSD", "add --lr-wsd-decay-iters 20"),
    ("--lr-wsd-decay-iters 10", "use --lr-decay-style WSD"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 200", "must be 1 to 100"),
    ("--start-weight-decay 0", "add it, or give --weight-decay alone"),
    ("--weight-decay-incr-style linear", "add --start-weight-decay 0 --end-weight-decay 0.01"),
    ("--weight-decay-incr-style linear --start-weight-decay 1 --end-weight-decay 0", "swap them"),
    ("--mock-data=false", "no data: give --data-path"),
    ("--data-path a", "--mock-data and --data-path exclude each other"),
    ("--mock-data=false --data-path a --valid-data-path b", "exclude each other; use --data-path alone"),
    ("--mock-data=false --valid-data-path b", "add --train-data-path"),
    ("--split 90,ten", "use --split 969,30,1"),
    ("--split 0,1", "use --split 969,30,1"),
    ("--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model"),
    ("--keep-last-checkpoints 5", "add --save checkpoints"),
    ("--exit-on-missing-checkpoint", "needs --load"),
    ("--ckpt-step 5", "needs --load"),
    ("--use-checkpoint-args", "--load is missing"),
    ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", "exclude each other"),
    ("--keep-last-checkpoints 2", "add --save checkpoints"),
    ("--save a --save-interval 10 --save-retain-interval 25", "use --save-retain-interval 30"),
    ("--profile --use-pytorch-profiler --profile-step-start 5 --profile-step-end 5",
     "use --profile-step-start 5 --profile-step-end 7"),
    ("--record-schedule --profile-step-start 5 --profile-step-end 5",
     "use --profile-step-start 5 --profile-step-end 7"),
    ("--profile", "add --use-pytorch-profiler for traces by torch"),
    ("--profile --pytorch-profiler-collect-shapes", "add that switch"),
    ("--profile --use-pytorch-profiler --record-shapes", "use --pytorch-profiler-collect-shapes"),
    ("--profile --use-pytorch-profiler --nvtx-ranges", "leave it out"),
    ("--profile-ranks 0 2 --world-size 2", "there is no rank 2 among 2; use ranks from 0 to 1"),
    ("--record-memory-history", "leave it out (--profile --use-pytorch-profiler traces a CPU)"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[line for line, _ in WRONG])
def test_one_mistake_is_one_problem(line: str, words: str):
    (problem,) = [p for p in found(line) if not p.startswith("the vocabulary is unknown")]
    assert words in problem


def test_facts_of_the_machine_are_judged():
    assert found("", Facts(world_size=4)) == []
    (problem,) = found("--world-size 8", Facts(world_size=4))
    assert problem.startswith("--world-size 8, but 4 ranks were started")
    (problem,) = found("", Facts(vocab_size=2000))
    assert problem == "--vocab-size 1000 is below the tokenizer's 2000 entries; use --vocab-size 2000, or leave it out"
    assert found("", Facts(tokenizer_error="no such tokenizer")) == ["no such tokenizer"]
    (problem,) = found("--device auto --distributed-backend gloo", Facts(cuda_available=True))
    assert "use --distributed-backend nccl, or --device cpu" in problem


@pytest.mark.parametrize(
    "line",
    [
        "--world-size 0 --num-virtual-stages-per-pipeline-rank 2",
        "--disable-bias-linear --num-experts 8 --world-size 8 --use-distributed-optimizer "
        "--num-distributed-optimizer-instances 2 --expert-model-parallel-size 0",
        "--pipeline-model-parallel-size 0 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24 "
        "--rampup-batch-size 4 4 100",
        "--bf16 --fp8-format e4m3 --context-parallel-size 0",
    ],
)
def test_a_size_of_zero_is_named_and_divides_nothing(line: str):
    assert any(" 0 is below 1; use 1 or more" in problem for problem in found(line))


def test_replicas_are_compared_by_default_where_there_are_some():
    flag = "--check-weight-hash-across-dp-replicas-interval"
    for line, interval in (("", 1000), (f"{flag} 0", 0), (f"{flag} 7", 7), ("--use-torch-fsdp2 --world-size 2", None)):
        config = resolve(parse(shlex.split(f"{BASE} {line}")).values, Facts())
        assert config.training.check_weight_hash_across_dp_replicas_interval == interval
    assert found(f"--world-size 2 --use-torch-fsdp2 {flag} 0") == []


def test_blends_follow_megatrons_rule():
    assert read_blend(["a"]) == Blend(("a",))
    assert read_blend(["a", "b"]) == Blend(("a", "b"))
    assert read_blend(["1", "a", "b"]) == Blend(("1", "a", "b"))
    assert read_blend(["0.3", "a", "2", "b"]) == Blend(("a", "b"), (0.3, 2.0))
    (problem,) = found("--mock-data=false --tokenizer-type ByteTokenizer --data-path 0.3 a b c")
    assert problem == "--data-path: 'b' stands where a weight should be; write: weight prefix weight prefix ..."


def test_an_empty_command_line_lists_everything_that_is_needed():
    listed = problems(resolve({}, Facts()), Facts())
    assert len(listed) == 4
    for flag in ("--num-layers", "--hidden-size", "--seq-length", "--micro-batch-size", "--lr", "--train-iters"):
        assert any(flag in problem for problem in listed), flag


def test_no_rule_raises_whatever_the_numbers():
    """Each number of the base launch in turn is missing, zero and negative: rules report, they never fail."""
    base = parse(shlex.split(f"{BASE} --world-size 4 --tensor-model-parallel-size 2")).values
    numbers = [name for name, value in base.items() if not isinstance(value, bool | str)]
    derived = [
        "pipeline_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
        "global_batch_size",
        "kv_channels",
    ]
    for name in [*numbers, *derived]:
        for wrong in (0, -1):
            allowed = name == "lr" and wrong == 0
            assert allowed or problems(resolve({**base, name: wrong}, Facts()), Facts()) != [], (name, wrong)
        assert isinstance(problems(resolve({k: v for k, v in base.items() if k != name}, Facts()), Facts()), list)


def test_absurd_sizes_are_answered_at_once():
    huge = 10**12
    for name in ("num_layers", "num_attention_heads", "global_batch_size", "world_size"):
        start = time.process_time()
        # Rules get such values from code alone: of flags and files they are refused as they are read.
        for line in (
            "--world-size 3 --tensor-model-parallel-size 2",
            "--pipeline-model-parallel-size 7 --world-size 7",
        ):
            values = parse(shlex.split(f"{BASE} {line}")).values | {name: huge}
            problems(resolve(values, Facts()), Facts())
        assert time.process_time() - start < 2, name


def test_layers_of_another_package_keep_nothing_that_is_gathered() -> None:
    line = "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --sequence-parallel-keep-gathered"
    facts = Facts(cuda_available=True, packages=frozenset({"transformer_engine"}))
    values = parse(shlex.split(f"{BASE} {line} --transformer-impl transformer_engine")).values
    assert problems(resolve(values, facts), facts) == [
        "--sequence-parallel-keep-gathered does not work with --transformer-impl transformer_engine; leave one of them "
        "out"
    ]


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    facts = gather_facts(parse(shlex.split(BASE)))
    assert found("--torch-compile", facts) == [
        "--torch-compile needs the C++ compiler no-such-compiler ($CXX); install it, or leave the switch out"
    ]


def test_each_rule_is_seen_to_speak_by_a_test_above():
    """A rule that no example reaches would be one that cannot fail."""
    spoken = set()
    lines = [line for line, _ in WRONG] + [example.flags for example in EXAMPLES.values()]
    facts = [
        Facts(missing_paths=("--data-path x.bin",), load_problem="a file", skip_samples_error="no number"),
        Facts(world_size=3, vocab_size=10**6, saved={}),
    ]
    for line in lines:
        for fact in facts:
            config = resolve(parse(shlex.split(f"{BASE} {line}")).values, fact)
            spoken |= {rule.__name__ for rule in RULES if list(rule(config, fact))}
    bare = resolve({}, Facts())
    spoken |= {rule.__name__ for rule in RULES if list(rule(bare, Facts()))}
    blend = resolve({"data_path": ("1", "a", "b", "c")}, Facts())
    spoken |= {rule.__name__ for rule in RULES if list(rule(blend, Facts()))}
    wandb = replace(bare, logging=replace(bare.logging, wandb_project="p"))
    spoken |= {rule.__name__ for rule in RULES if list(rule(wandb, Facts()))}
    spoken |= {rule.__name__ for rule in RULES if list(rule(bare, Facts(huggingface={"num_layers": 2})))}
    assert {rule.__name__ for rule in RULES} == spoken


PROGRAM = [sys.executable, str(ROOT / "pretrain_gpt.py")]


def timed(arguments: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Return the seconds of computing, which do not count what else the machine does, and what the program printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result


def test_an_embedding_may_decay_to_nothing_while_the_rest_does_not():
    assert found("--min-lr 1e-4 --decoupled-lr 5e-5 --decoupled-min-lr 0") == []
    assert len(found("--min-lr 1e-4 --decoupled-lr 5e-5")) == 1


@pytest.mark.parametrize("arguments", [["--help"], [*shlex.split(BASE), "--world-size", "8"]], ids=["help", "dry-run"])
def test_help_and_dry_run_answer_within_a_second_without_torch(arguments: list[str]):
    seconds, result = min((timed(arguments) for _ in range(2)), key=lambda run: run[0])  # the first may compile
    assert result.returncode == 0
    assert seconds < 1.0
    imports = subprocess.run(
        [sys.executable, "-X", "importtime", *PROGRAM[1:], *arguments], capture_output=True, text=True, check=True
    ).stderr
    assert "megatron_ext.config" in imports
    assert not any(line.split("|")[-1].strip() in ("torch", "numpy", "megatron.core") for line in imports.splitlines())


WRONG_LINES = [*(example.flags for example in EXAMPLES.values()), "--hiden-size 4", SEVERAL]


@pytest.mark.parametrize("line", WRONG_LINES[-1:])
def test_a_wrong_command_line_ends_the_process_with_64_in_two_seconds(line: str):
    seconds, result = timed(shlex.split(f"{BASE} {line}"))
    assert result.returncode == 64
    assert seconds < 2.0
    assert "Traceback" not in result.stderr


def test_each_wrong_line_ends_with_64_before_torch_is_loaded():
    """In one interpreter, for starting it takes longer than what is asked."""
    command = [sys.executable, "-m", "tests.support.ends_of_lines"]
    lines = json.dumps([shlex.split(f"{BASE} {line}") for line in WRONG_LINES])
    done = subprocess.run(command, input=lines, cwd=ROOT, capture_output=True, text=True, check=True)
    for line, (code, seconds, said) in zip(WRONG_LINES, json.loads(done.stdout), strict=True):
        assert code == 64, line
        assert seconds < 1.0, line  # torch alone takes longer
        assert "Traceback" not in said, line
        assert said, line


@pytest.mark.parametrize("switch", ["--no-position-embedding", "--no-position-embedding=true"])
def test_no_position_embedding_changes_nothing_with_rope(switch: str, tmp_path: Path):
    """As in Megatron, whose Mixtral script has the pair; the type may also come from a file."""
    (tmp_path / "run.yaml").write_text("position_embedding_type: rope\n")
    plain = configure(shlex.split(f"{BASE} --position-embedding-type rope"))
    assert plain.typed.warnings == ()
    for kind in ("--position-embedding-type rope", f"--config {tmp_path}/run.yaml"):
        both = configure(shlex.split(f"{BASE} {kind} {switch}"))
        assert replace(both.config.model, no_position_embedding=False) == plain.config.model
        [warning] = both.typed.warnings
        assert warning.startswith("--no-position-embedding changes nothing with --position-embedding-type rope")


def test_no_position_embedding_is_judged_as_by_megatrons_own_source():
    """The wheel's condition, read and evaluated for each type that we have."""
    source = (Path(importlib.util.find_spec("megatron.core").origin).parents[1] / "training/arguments.py").read_text()  # pyright: ignore
    [condition] = [
        ast.unparse(node.test)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and "--no-position-embedding is deprecated" in ast.unparse(node.body[0])
    ]
    for kind in options_by_name()["position_embedding_type"].choices or ():
        args = SimpleNamespace(add_position_embedding=False, position_embedding_type=kind)
        refused = eval(condition, {"args": args})
        assert bool(found(f"--no-position-embedding --position-embedding-type {kind}")) == refused, kind
