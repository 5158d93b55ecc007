"""A launch script written for Megatron starts as it is: what it takes, what it leaves out with a warning, what it
refuses, all in one round."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse, read
from megatron_ext.config.parse.options import options_by_flag
from megatron_ext.config.parse.other_flags import find_option
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate import other_programs
from megatron_ext.plugins.prepare.tokenizer_flags import add_tokenizer_flags, tokenizer_values
from megatron_ext.train.configure import Configured, configure
from tests.support.wrong_flags import BASE


def configured(line: str) -> Configured:
    return configure(shlex.split(f"{BASE} {line}"))


def problems_of(line: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        configured(line)
    return caught.value.problems


def test_flags_that_cannot_be_read_hide_no_rule():
    found = problems_of("--hiden-size 4 --lr fast --mla-down-proj-fusion --world-size 3 --tensor-model-parallel-size 2")
    starts = [
        "--lr: 'fast' is not a number",
        "--mla-down-proj-fusion is not supported",
        "unknown flag --hiden-size; did you mean --hidden-size?",
        "world size 3 is not a multiple of --tensor-model-parallel-size 2",
    ]
    assert [problem.startswith(start) for problem, start in zip(found, starts, strict=True)] == [True] * 4


def test_what_follows_from_an_unreadable_value_is_not_reported_too():
    line = (
        "--num-layers x --hidden-size 64 --seq-length 8 --micro-batch-size 1 --train-iters 1 --mock-data --vocab-size 9"
    )
    with pytest.raises(ConfigurationError) as caught:
        configure(shlex.split(line))
    unreadable, missing = caught.value.problems
    assert unreadable == "--num-layers: 'x' is not an integer"
    assert missing.startswith("missing: --num-attention-heads, --lr; for example")


def test_a_file_s_mistakes_hide_no_rule(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("hiden_size: 4\nmin_lr: low\n")
    spelling, value, rule = problems_of(f"--config {tmp_path}/run.yaml --swiglu --squared-relu")
    assert value == f"{tmp_path}/run.yaml: min_lr: 'low' is not a number"
    assert spelling == f"{tmp_path}/run.yaml: unknown name hiden_size; did you mean hidden_size?"
    assert rule.startswith("--swiglu and --squared-relu name different activations")


@pytest.mark.parametrize(
    ("flag", "guess"),
    [
        ("--use-npu", None),
        ("--run-mode", None),
        ("--spli", "--split"),
        ("--tensor-parallel-model-size", "--tensor-model-parallel-size"),
        ("--hiden_size", "--hidden-size"),
    ],
)
def test_a_guess_is_made_only_where_it_is_likely(flag: str, guess: str | None):
    (problem,) = read([flag, "1"]).problems
    advice = "see --help all for every flag, or add --allow-unknown-flags to leave it out"
    assert problem.partition("; ")[2] == (f"did you mean {guess}?" if guess else advice)


def test_underscores_stand_for_hyphens():
    assert parse(shlex.split("--num_layers 4 --logging_level 5")).values == {"num_layers": 4}
    assert read(["--mla_down_proj_fusion"]).problems[0].startswith("--mla-down-proj-fusion is not supported")


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--tokenizer-type Llama2Tokenizer", {"tokenizer_type": "SentencePieceTokenizer"}),
        ("--tokenizer-type GPTSentencePieceTokenizer", {"tokenizer_type": "SentencePieceTokenizer"}),
        ("--vocab-file v --merge-file m", {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v", "merge_file": "m"}),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        ("--use-rotary-position-embeddings --position-embedding-type rope", {"position_embedding_type": "rope"}),
        ("--encoder-num-layers 4 --encoder-seq-length 8", {"num_layers": 4, "seq_length": 8}),
        ("--sequence-parallel=false", {}),
    ],
)
def test_an_old_spelling_is_taken_silently_as_the_new_one(line: str, values: dict[str, Any], tmp_path: Path):
    typed = parse(line.split())
    assert (typed.values, typed.warnings) == (values, ())


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--hostfile", "start torchrun --nproc-per-node GPUS --nnodes MACHINES"),
        ("--num_gpus", "start torchrun --nproc-per-node GPUS --nnodes MACHINES"),
        ("--config_file", "megatron-ext import-config --from accelerate FILE"),
    ],
)
def test_a_flag_of_another_launcher_is_named_with_what_to_do_instead(flag: str, words: str):
    (problem,) = read([flag, "2"]).problems
    assert problem.startswith(f"{flag} is unknown: it is ")
    assert words in problem
    assert parse([flag, "2", "--allow-unknown-flags"]).values == {}


@pytest.mark.parametrize(
    ("flags", "exchange"),
    [
        ("", "a2a"),  # attention dropout is Megatron's default, 0.1
        ("--attention-dropout 0", "p2p"),
        ("--attention-dropout 0 --cp-comm-type all_gather", "all_gather"),
        ("--context-parallel-size 1 --world-size 1", "p2p"),
    ],
)
def test_attention_dropout_chooses_the_exchange_that_has_it(flags: str, exchange: str):
    """Scripts of Megatron-LM name no exchange."""
    found = configured(f"--world-size 2 --context-parallel-size 2 {flags}")
    assert found.config.layout.cp_comm_type == (exchange,)
    assert ["--cp-comm-type a2a" in warning for warning in found.typed.warnings] == [True] * (exchange == "a2a")


def test_heads_that_do_not_divide_leave_the_ring_which_is_refused():
    [problem] = problems_of("--world-size 16 --context-parallel-size 16")
    assert problem.startswith("--cp-comm-type p2p puts attention together from blocks, whose kernels have no dropout")


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("moe_act layernorm", {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}),
        ("moe_act mla_up_proj", {}),
        ("core_attn", {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}),
    ],
)
def test_what_is_not_recomputed_by_itself_is_left_out(given: str, left: dict[str, Any]):
    typed = parse(f"--recompute-granularity selective --recompute-modules {given}".split())
    assert typed.values == left
    dropped = [part for part in given.split() if part in ("moe_act", "mla_up_proj")]
    said = [warning.partition(" changes nothing here")[0] for warning in typed.warnings]
    assert said == ([f"--recompute-modules {' '.join(dropped)}"] if dropped else [])


def test_the_equivalents_of_other_programs_flags_are_flags():
    foreign = {"--nnodes", "--node-rank", "--master-addr", "--nproc-per-node", "--from"}  # torchrun's and a tool's
    for flag, text in other_programs.FLAGS.items():
        assert flag not in options_by_flag()
        assert find_option(flag) is None
        assert set(re.findall(r"--[a-z][a-z0-9-]*", text)) <= foreign | set(options_by_flag()), flag


DROPPED = [
    ("--sequence-parallel", "--tensor-model-parallel-size 1"),
    ("--save-interval 5", "without --save"),
    ("--eval-iters -1", "as with --eval-iters 0"),
    ("--grad-reduce-in-bf16", "without --bf16"),
    ("--use-precision-aware-optimizer", "say by themselves what is kept in 16 bits"),
    ("--main-grads-dtype bf16", "without --bf16"),
    ("--world-size 2 --bf16 --use-megatron-fsdp --grad-reduce-in-bf16", "--use-megatron-fsdp sums and keeps"),
    ("--world-size 2 --bf16 --use-torch-fsdp2 --grad-reduce-in-bf16", "--use-torch-fsdp2 sums and keeps"),
    ("--tokenizer-type ByteTokenizer --vocab-size 257 --tiktoken-pattern v2", "only --tokenizer-type TikTokenizer"),
    ("--tokenizer-type ByteTokenizer --vocab-size 257 --vocab-file v", "only --tokenizer-type GPT2BPETokenizer"),
    ("--world-size 2 --use-megatron-fsdp --use-distributed-optimizer", "--data-parallel-sharding-strategy"),
    ("--world-size 2 --use-megatron-fsdp --overlap-grad-reduce", "layer by layer"),
    ("--world-size 2 --use-megatron-fsdp --overlap-param-gather", "layer by layer"),
    ("--use-persistent-ckpt-worker", "background thread"),
    ("--dist-ckpt-strictness log_all", "is refused"),
    ("--ckpt-format torch", "torch_dist"),
    ("--ckpt-format fsdp_dtensor", "torch_dist"),
    ("--expert-tensor-parallel-size 4", "no experts"),
    ("--moe-router-topk 2", "no experts"),
    ("--disable-bias-linear --num-experts 8 --moe-grouped-gemm", "without --bf16"),
    ("--disable-bias-linear --num-experts 8 --bf16 --moe-grouped-gemm --moe-ffn-hidden-size 84", "have 128 x 84"),
    ("--manual-gc-interval 5", "without --manual-gc"),
    ("--rotary-base 5000", "no rotary positions"),
    ("--position-embedding-type rope --rope-scaling-factor 4", "without --use-rope-scaling"),
    ("--loss-scale 128", "without --fp16"),
    ("--min-lr 1e-4 --lr-decay-style constant", "--lr-decay-style constant"),
    ("--position-embedding-type none --reset-position-ids", "knows no positions"),
    ("--eval-interval 0 --start-eval-at-iter 5", "nothing is evaluated"),
    ("--recompute-method uniform", "nothing is recomputed"),
    ("--disable-bias-linear --num-experts 8 --moe-token-dispatcher-type flex", "alltoall"),
    ("--disable-bias-linear --num-experts 8 --transformer-impl transformer_engine", "--transformer-impl local"),
    ("--world-size 2 --use-torch-fsdp2 --transformer-impl transformer_engine", "--transformer-impl local"),
    ("--world-size 2 --context-parallel-size 2 --attention-dropout 0 --cp-comm-type a2a+p2p", "around one ring"),
]


@pytest.mark.parametrize(("line", "words"), DROPPED, ids=[line for line, _ in DROPPED])
def test_what_has_no_bearing_is_taken_with_one_warning(line: str, words: str):
    (warning,) = configured(line).typed.warnings
    assert " changes nothing here: " in warning
    assert words in warning


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--use-fused-rmsnorm", {}),
        ("--use-fused-rmsnorm 1", {}),  # on Gaudi it takes a number
        ("--context-parallel-algo ulysses_cp_algo", {"cp_comm_type": ("a2a",)}),
        (
            "--moe-router-num-groups 1 --moe-router-group-topk 1 --first-k-dense-replace 0",
            {"moe_router_num_groups": 1, "moe_router_group_topk": 1},
        ),
        ("--moe-layer-freq -1", {"moe_layer_freq": "-1"}),
        ("--optimizer fusedadamw --wandb-name x", {"optimizer": "adam", "wandb_exp_name": "x"}),
        ("--exit-interval 0 --exit-duration-in-mins 0 --save x --save-interval 0", {"save": "x"}),
        ("--use-torch-fsdp2 --overlap-grad-reduce --overlap-param-gather", {"use_torch_fsdp2": True}),
    ],
)
def test_what_forks_write_is_taken(line: str, values: dict[str, Any]):
    assert parse(line.split()).values == values


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--hccl-op-mode", "--hccl-op-mode needs a value"),
        ("--first-k-dense-replace 1", "--first-k-dense-replace 1 is not supported: of a mixture of experts"),
        ("--moe-expert-rank-capacity-factor 8", "--moe-expert-rank-capacity-factor 8 is not supported"),
        ("--dataset LLama-SFT", "--dataset LLama-SFT is not supported: --data-path reads .bin and .idx files"),
        ("--fix-sub-seq-length 8", "--fix-sub-seq-length is unknown: it is MindSpeed's, for measuring speed"),
        ("--exit-interval -1", "--exit-interval -1 is below 1"),
    ],
)
def test_what_forks_train_otherwise_is_refused(line: str, words: str):
    [problem] = problems_of(line) if "interval" in line else read(line.split()).problems
    assert problem.startswith(words)


def test_documents_are_kept_apart_by_our_layers_whatever_is_asked_for():
    """Scripts of Megatron-LM say `--transformer-impl transformer_engine` nearly always."""
    found = configured("--transformer-impl transformer_engine --reset-attention-mask --attention-dropout 0")
    assert found.config.model.transformer_impl == "local"
    assert ["documents that are kept apart" in warning for warning in found.typed.warnings] == [True]


def test_quotes_that_a_script_has_twice_are_taken_off():
    plain, twice = (configured(f"--split {split}") for split in ("99,1,0", "\"'99,1,0'\""))
    assert twice.config == plain.config
    assert twice.typed.warnings == plain.typed.warnings


def test_tools_take_old_names_of_tokenizers_too():
    parser = argparse.ArgumentParser()
    add_tokenizer_flags(parser, required=True)
    line = ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "m"]
    assert tokenizer_values(parser.parse_args(line))["tokenizer_type"] == "SentencePieceTokenizer"


@pytest.mark.parametrize("flag", ["--check-before-update", "--no-triton-kernels"])
def test_switches_of_what_only_gpus_do_say_so_on_a_cpu(flag: str) -> None:
    words = shlex.split("""
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 128
        --micro-batch-size 2 --lr 1e-3 --train-iters 2
    """)
    said = [warning for warning in configure([*words, "--device", "cpu", flag]).typed.warnings if flag in warning]
    assert [warning.partition(" here: ")[0] for warning in said] == [f"{flag} changes nothing"]
    assert "--device cpu" in said[0]
    assert not [warning for warning in configure([*words, "--device", "auto", flag]).typed.warnings if flag in warning]


def test_restarts_that_forget_what_was_saved_are_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun starts the ranks again with the same --load."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    base, save = tmp_path / "base", tmp_path / "save"

    def said(flags: str) -> str:
        return " ".join(one for one in configured(flags).typed.warnings if "torchrun may start the ranks" in one)

    assert said(f"--save {save} --load {save}/") == said("--load base") == ""
    assert said(f"--save {save}").endswith(
        f"begins afresh, not with what --save {save} holds by then; add --load {save}, which may be empty at first"
    )
    assert f"3 times more, and each restart begins with --load {base} again" in said(f"--save {save} --load {base}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert said(f"--save {save}") == ""
