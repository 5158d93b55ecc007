"""What the command line and a file of flags become: precedence, what is wrong with them, what is dropped, and both
sides of every bound of a value. Expected values are written by hand."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse import help_text, other_flags
from megatron_ext.config.parse.arguments import parse, read
from megatron_ext.config.parse.help_text import about, default_text
from megatron_ext.config.parse.options import options_by_flag, options_by_name, read_texts, read_yaml_value
from megatron_ext.config.parse.other_flags import OtherOption, advice
from megatron_ext.errors import listed
from megatron_ext.plugins.megatron_lm import megatron_options
from megatron_ext.plugins.megatron_lm.reference import other_default

FULL = {"recompute_method": "uniform", "recompute_num_layers": 1}


def _typed(line: str, file: str | None = None, folder: Path | None = None) -> Any:
    words = shlex.split(line)
    if file is not None:
        assert folder is not None
        (folder / "run.yaml").write_text(file)
        words += ["--config", str(folder / "run.yaml")]
    return read(words)


@pytest.mark.parametrize(
    ("line", "file", "values"),
    [
        ("--checkpoint-activations", None, {"recompute_granularity": "full", **FULL}),
        (
            "--checkpoint-activations",
            "recompute_method: block\nrecompute-num-layers: 3\n",
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        ),
        (
            "--recompute-num-layers 5",
            "checkpoint-activations: true\n",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 5},
        ),
        (
            "--activations-checkpoint-method block",
            None,
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        ),
        ("--seed 3", "checkpoint-activations: false\nactivations-checkpoint-method:\n", {"seed": 3}),
        ("--sequence-parallel=false", "hidden_dropout: 0\nuse_cpu_initialization: false\n", {"hidden_dropout": 0.0}),
        (
            "--tensor-model-parallel-size 2",
            "sequence_parallel: false\n",
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        ),
        (
            "--vocab-file a --merge-file b",
            None,
            {"vocab_file": "a", "merge_file": "b", "tokenizer_type": "GPT2BPETokenizer"},
        ),
        (
            "--recompute-num-layers 5 --checkpoint-activations --recompute-method block",
            None,
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 5},
        ),
        (
            "--position-embedding-type learned_absolute --use-rotary-position-embeddings",
            None,
            None,
        ),
        ("--vocab-file a", None, {"vocab_file": "a"}),
        ("", "tokenizer_type: Llama2Tokenizer\n", {"tokenizer_type": "SentencePieceTokenizer"}),
        ("--data-path a=b=c", None, {"data_path": ("a=b=c",)}),
        ("--data-path=a=b c", None, {"data_path": ("a=b", "c")}),
        ("--global_batch_size 3", None, {"global_batch_size": 3}),
        ("--save x --save-interval 2 --save-interval 3", None, {"save": "x", "save_interval": 3}),
        ("--rampup-batch-size 2 -1 .5", None, None),
        ("--lr -.5", None, {"lr": -0.5}),
    ],
)
def test_of_several_places_one_wins(line: str, file: str | None, values: dict[str, Any] | None, tmp_path: Path) -> None:
    """A flag over a file, a field's own flag over what an old spelling only implies; 0 and false are values."""
    typed = _typed(line, file, tmp_path)
    if values is None:
        assert len(typed.problems) == 1
        return
    assert typed.problems == ()
    assert (typed.values, typed.warnings) == (values, ())


@pytest.mark.parametrize(
    ("line", "file", "problems", "unread"),
    [
        ("--config", None, ["--config needs the path of a YAML file"], set()),
        ("--config a b --dry-run", None, None, set(options_by_name())),
        ("--dry-run x", None, ["unexpected argument 'x' after --dry-run"], set()),
        ("--seed 1 2 3", None, [f"unexpected argument '{word}' after --seed" for word in "23"], set()),
        ("--sequence-parallel 1", None, ["unexpected argument '1' after --sequence-parallel"], set()),
        ("x --seed 1", None, ["unexpected argument 'x': every value follows a flag; see --help"], set()),
        ("--seed", None, ["--seed needs a value: --seed N"], {"seed"}),
        ("--seed x", None, ["--seed: 'x' is not an integer"], {"seed"}),
        ("", "seed: x\n", ["{file}: seed: 'x' is not an integer"], {"seed"}),
        ("--num-layer 3", None, ["unknown flag --num-layer; did you mean --num-layers?"], {"num_layers"}),
        ("", "num_layer: 3\n", ["{file}: unknown name num_layer; did you mean num_layers?"], {"num_layers"}),
        ("", "zzz: 3\n", ["{file}: unknown name zzz; see --help all for every name"], set()),
        (
            "--dry-run --device-memory-gb 0",
            None,
            ["--device-memory-gb 0 is not above 0; use --device-memory-gb 80"],
            set(),
        ),
        ("--dry-run --device-memory-gb inf", None, 1, set()),
        ("--dry-run --device-memory-gb x", None, ["--device-memory-gb: 'x' is not a number"], set()),
        (
            "--device-name h100",
            None,
            ["--device-name is what --dry-run judges a layout by; add --dry-run, or leave it out"],
            set(),
        ),
        ("", "batch-size: 2\nmicro_batch_size: 3\n", 1, {"micro_batch_size"}),
        ("", "micro-batch-size: 2\nmicro_batch_size: 3\n", 1, {"micro_batch_size"}),
        ("", "mtp_detach_heads: true\n", 1, set()),
        ("--deepspeed_config x", None, 1, set()),
        ("--use-mcore-models 1", None, ["unexpected argument '1' after --use-mcore-models"], set()),
        (
            "--local-rank 1 2 3",
            None,
            [f"unexpected argument '{word}' after --local-rank" for word in "23"],
            set(),
        ),
        (
            "--num-speculative-tokens 1 2",
            None,
            [
                "unexpected argument '2' after --num-speculative-tokens",
                "--num-speculative-tokens 1 is not supported: depths of multi-token prediction are trained with the "
                "model on the last stage, and megatron-ext generate --speculative takes their drafts; leave it out",
            ],
            set(),
        ),
        ("--local-rank", None, ["--local-rank needs a value"], set()),
        ("--use-rotary-position-embeddings 1", None, 1, set()),
        ("--per-split-data-args-path /proc/self/nowhere/x", None, 0, set()),
        (
            "--data-args-path /dev/null/x",
            None,
            ["--data-args-path /dev/null/x: Not a directory; give another path"],
            set(),
        ),
    ],
)
def test_what_is_wrong_is_said_once(
    line: str, file: str | None, problems: list[str] | int | None, unread: set[str], tmp_path: Path
) -> None:
    typed = _typed(line, file, tmp_path)
    assert typed.unread == unread
    if isinstance(problems, int):
        assert len(typed.problems) == problems
    elif problems is None:
        assert typed.problems[0] == "unexpected argument 'b' after --config"
    else:
        assert list(typed.problems) == [problem.format(file=tmp_path / "run.yaml") for problem in problems]


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"num_layers: 4 # \xff\n")
    [problem] = read(["--config", str(tmp_path / "run.yaml")]).problems
    assert problem.startswith(f"--config {tmp_path}/run.yaml is not valid YAML: 'utf-8' codec can't decode byte 0xff")


@pytest.mark.parametrize(("length", "own_line"), [(10, False), (41, False), (42, True), (43, True), (44, True)])
def test_sentences_of_the_help_stand_in_one_column(length: int, own_line: bool) -> None:
    """Two blanks at least after the flag; one that is longer has a line of its own."""
    flag = "--" + "x" * (length - 2)
    found = help_text._entry(flag, "word " * 40)
    assert found[0] == f"  {flag}" if own_line else found[0].startswith(f"  {flag}   ")
    for line in found[own_line:]:
        assert line[:46].replace(flag, "").strip() == ""
        assert line[46:].startswith("word word")
        assert len(line) <= 120


def test_unknown_flags_and_names_are_left_out_where_asked(tmp_path: Path) -> None:
    typed = _typed("--allow-unknown-flags --zzzz 3", "yyyy: 4\n", tmp_path)
    assert typed.problems == ()
    assert typed.warnings == tuple(
        f"{name} is unknown and left out, as --allow-unknown-flags says"
        for name in ("--zzzz", f"{tmp_path}/run.yaml: yyyy")
    )


def test_warnings_of_the_file_come_before_those_of_the_command_line(tmp_path: Path) -> None:
    typed = _typed("--use-mcore-models --no-rope-fusion", "use_flash_attn: true\nno_rope_fusion: true\n", tmp_path)
    assert [warning.split()[0] for warning in typed.warnings] == [
        "--use-flash-attn",
        "--no-rope-fusion",
        "--use-mcore-models",
    ]


DROPPED: list[tuple[str, list[str]]] = [
    ("--sequence-parallel --sequence-parallel-keep-gathered", ["sequence_parallel", "sequence_parallel_keep_gathered"]),
    ("--sequence-parallel --tensor-model-parallel-size 2", []),
    ("--sequence-parallel=false", ["(silently) sequence_parallel"]),
    ("--save-interval 5 --save-retain-interval 10", ["save_interval", "save_retain_interval"]),
    ("--save-interval 5 --save-retain-interval 10 --save x", []),
    ("--save-interval 0", ["save_interval"]),
    ("--save-interval 0 --save x", ["save_interval"]),
    ("--exit-interval 0 --exit-duration-in-mins 0", ["exit_interval", "exit_duration_in_mins"]),
    ("--exit-interval 1 --exit-duration-in-mins 1", []),
    ("--recompute-method block --recompute-num-layers 2", ["recompute_method", "recompute_num_layers"]),
    ("--recompute-method block --recompute-num-layers 2 --recompute-activations", []),
    ("--recompute-method block --recompute-num-layers 2 --recompute-granularity full", []),
    (
        "--use-megatron-fsdp --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 5",
        ["use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"],
    ),
    ("--use-torch-fsdp2 --overlap-grad-reduce --overlap-param-gather", ["overlap_grad_reduce", "overlap_param_gather"]),
    ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5", []),
    ("--grad-reduce-in-bf16 --main-grads-dtype bf16", ["grad_reduce_in_bf16", "main_grads_dtype"]),
    ("--grad-reduce-in-bf16 --main-grads-dtype bf16 --bf16", []),
    ("--main-grads-dtype fp32", []),
    *(
        (f"--grad-reduce-in-bf16 --main-grads-dtype bf16 --bf16 {scheme}", ["grad_reduce_in_bf16", "main_grads_dtype"])
        for scheme in ("--use-megatron-fsdp", "--use-torch-fsdp2")
    ),
    (
        "--fp8-recipe rowwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 2",
        ["fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"],
    ),
    (
        "--fp8-format e4m3 --fp8-recipe rowwise --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 2",
        ["num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"],
    ),
    (
        "--fp8-format e4m3 --first-last-layers-bf16=false --num-layers-at-start-in-bf16 2",
        ["num_layers_at_start_in_bf16"],
    ),
    ("--fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 2", []),
    ("--cuda-graph-warmup-steps 1", ["cuda_graph_warmup_steps"]),
    ("--cuda-graph-warmup-steps 9", ["cuda_graph_warmup_steps"]),
    ("--cuda-graph-impl local --cuda-graph-warmup-steps 9", ["cuda_graph_impl", "cuda_graph_warmup_steps"]),
    ("--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 9", []),
    ("--expert-tensor-parallel-size 2 --moe-grouped-gemm", ["expert_tensor_parallel_size", "moe_grouped_gemm"]),
    ("--expert-tensor-parallel-size 2 --moe-grouped-gemm --num-experts 4", []),
    ("--expert-tensor-parallel-size 2 --moe-grouped-gemm --load-hf x", []),
    ("--expert-tensor-parallel-size 2 --moe-grouped-gemm --use-checkpoint-args --load x", []),
    ("--vocab-file a --tokenizer-type NullTokenizer", ["vocab_file"]),
    ("--vocab-file a", []),
    ("--sequence-parallel --tensor-model-parallel-size 0", []),
    ("--vocab-file a --merge-file b --tokenizer-type GPT2BPETokenizer", []),
    ("--tiktoken-pattern v2 --tokenizer-type TikTokenizer --merge-file b", ["merge_file"]),
    ("--recompute-granularity full --recompute-modules moe", ["recompute_modules"]),
]


@pytest.mark.parametrize(("line", "dropped"), DROPPED, ids=[line for line, _ in DROPPED])
def test_what_changes_nothing_next_to_other_flags_is_dropped_with_a_warning(line: str, dropped: list[str]) -> None:
    """And nothing else is; a switch that is taken back needs no word."""
    typed = parse(shlex.split(line))
    words = line.replace("=", " ").split()
    given = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    given |= {name for name in typed.values if name == "tokenizer_type"}
    names = [name.removeprefix("(silently) ") for name in dropped]
    assert set(typed.values) == given - set(names)
    said = [warning.split()[0][2:].replace("-", "_") for warning in typed.warnings if "changes nothing here" in warning]
    assert sorted(said) == sorted(name for name in dropped if not name.startswith("("))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_layers", 4, 4),
        ("num_layers", "4", 4),
        ("num_layers", True, "True is not an integer"),
        ("num_layers", 4.5, "'4.5' is not an integer"),
        ("num_layers", [4], r"[4] is not an integer"),
        ("num_layers", 10**15, None),
        ("seed", 10**15, 10**15),
        ("seed", 10**15 + 1, "1000000000000001 is above 1000000000000000; use 1000000000000000 or less"),
        ("seed", -(10**15) - 1, "-1000000000000001 is above 1000000000000000; use 1000000000000000 or less"),
        ("lr", "1e-3", 1e-3),
        ("lr", float("inf"), "'inf' is not a finite number"),
        ("lr", float("-inf"), "'-inf' is not a finite number"),
        ("lr", float("nan"), "'nan' is not a finite number"),
        ("swiglu", False, False),
        ("swiglu", "true", "'true' is not true or false"),
        ("swiglu", 1, "1 is not true or false"),
        ("data_path", "a", ("a",)),
        ("data_path", ["a", 3], ("a", "3")),
        ("data_path", [], "the list is empty"),
        ("data_path", [["a"]], "['a'] is not a text"),
        ("save", "", "the value is empty; give one, or leave the flag out"),
        ("save", "a\0b", "'a\\x00b' holds a zero byte"),
        ("save", "a\udfff", "'a\\udfff' is not UTF-8; rename the file, or correct the value"),
        ("save", "a\ud800", "'a\\ud800' is not UTF-8; rename the file, or correct the value"),
        ("save", None, "None is not a text"),
        ("seed", "x" * 200, f"'{'x' * 200}' is not an integer"),
        ("seed", "x" * 201, f"'{'x' * 100}'...'{'x' * 20}' (201 characters) is not an integer"),
    ],
)
def test_values_of_a_file_are_those_of_the_flag(name: str, value: Any, expected: Any) -> None:
    if expected is None or (isinstance(expected, str) and expected != value):
        with pytest.raises(ValueError, match=r"\S") as error:
            read_yaml_value(options_by_name()[name], value)
        assert expected is None or str(error.value) == expected
        return
    found = read_yaml_value(options_by_name()[name], value)
    assert (found, type(found)) == (expected, type(expected))


def test_every_spelling_of_a_flag_is_known() -> None:
    for option in options_by_name().values():
        for flag in (option.flag, *option.aliases):
            assert options_by_flag()[flag] is option
            assert flag in about([flag])
        if option.is_switch:
            assert default_text(option) == ""
        elif option.default is None:
            assert default_text(option) == ("required" if option.required else "")
        assert about([option.flag.upper()]) == about([option.flag])
    with pytest.raises(ValueError, match="'gelu' is not one of none, linear, sqrt"):
        read_texts(options_by_name()["lr_scale_rule"], ["gelu"])


def test_the_tables_of_megatrons_options() -> None:
    """Of switches, of one value, of many, and of values that ask for nothing."""
    tables = (((("one", "--a, --b N,\n  --c N..."),), True), ((("two", "--d =x;y, --e N =1"),), False))
    found = {name: vars(option) for name, option in megatron_options._read_tables(*tables).items()}
    expected = [
        ("--a", "one", True, 0, None, False),
        ("--b", "one", True, 1, None, True),
        ("--c", "one", True, 1_000_000, None, False),
        ("--d", "two", False, 0, "x;y", False),
        ("--e", "two", False, 1, "1", True),
    ]
    assert [tuple(values.values())[:6] for values in found.values()] == expected
    with pytest.raises(AssertionError, match="--a is listed twice"):
        megatron_options._read_tables(((("one", "--a"), ("two", "--a N")), True))
    known = [other_flags.find_option(flag) for flag in ("--use-mcore-models", "--extra-vocab-size", "--seed")]
    assert [None if option is None else option.flag for option in known] == [
        "--use-mcore-models",
        "--extra-vocab-size",
        None,
    ]
    assert other_flags.find_spelling("--encoder-num-layers") == ("num_layers", None)
    assert other_flags.find_spelling("--wandb-name") == ("wandb_exp_name", None)
    assert other_flags.taken_value("tokenizer_type", "Llama2Tokenizer") == ("SentencePieceTokenizer", None)
    assert other_flags.taken_value("tokenizer_type", "llama2tokenizer") == ("llama2tokenizer", None)
    assert other_flags.taken_value("normalization", "rmsnorm") == ("RMSNorm", None)
    assert other_default("--exit-signal-handler") is not None
    assert other_default("--transformer-impl") is not None
    assert other_default("--hidden-size") is None


@pytest.mark.parametrize(
    ("neutral", "values", "silent"),
    [
        (None, [], False),
        ("1", ["1"], True),
        ("1", ["1.0"], True),
        ("1", ["10"], False),
        ("0.5", ["5e-1"], True),
        ("0;-1", ["-1"], True),
        ("0;-1", ["1"], False),
        ("spectral", ["spectral"], True),
        ("spectral", ["spectra"], False),
        ("", [""], True),
    ],
)
def test_what_asks_for_nothing_passes_silently(neutral: str | None, values: list[str], silent: bool) -> None:
    option = OtherOption("--flag", "because", accepted=True, most_values=1, neutral=neutral)
    assert option.is_neutral(values) == silent


def test_words() -> None:
    assert [listed(values) for values in ((), (1,), (1, 2), (1, 2, 4))] == ["", "1", "1 or 2", "1, 2 or 4"]
    assert advice("--config_file") == advice("--config-file") is not None
    assert advice("--seed") is None
