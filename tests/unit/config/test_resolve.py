"""What follows from typed flags and from files that they name: derived values, a checkpoint's flags, blends, lists of
tasks, a run's own file. Expected values are written by hand."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse, read
from megatron_ext.config.parse.blend import missing_paths, read_blend
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.config.parse.saved import adopt, model_names, read_saved
from megatron_ext.config.resolve import Facts, resolve, runs_on_cpu
from megatron_ext.config.schema import Config, LayoutConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.eval_tasks import look_at_eval_tasks, read_eval_tasks

BASE = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 6, "seq_length": 32, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("typed", "facts", "expected"),
    [
        ({}, {}, {"world_size": 1, "ffn_hidden_size": 192, "kv_channels": 8, "num_query_groups": 6}),
        ({}, {"world_size": 4}, {"world_size": 4, "global_batch_size": 8}),
        ({}, {"world_size": 0}, {"world_size": 0, "global_batch_size": None}),
        ({"world_size": 8}, {"world_size": 4}, {"world_size": 8, "global_batch_size": 16}),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2},
            {"world_size": 16},
            {"global_batch_size": 4},
        ),
        ({"global_batch_size": 6}, {"world_size": 4}, {"global_batch_size": 6}),
        ({"group_query_attention": True}, {}, {"num_query_groups": 1}),
        ({"hidden_size": 768, "swiglu": True}, {}, {"ffn_hidden_size": 2048}),
        ({"hidden_size": 760, "swiglu": True}, {}, {"ffn_hidden_size": 1984}),
        ({"hidden_size": 12, "swiglu": True, "num_attention_heads": 1}, {}, {"ffn_hidden_size": 64}),
        ({}, {"huggingface": {"num_layers": 9, "norm_epsilon": 0.5}}, {"num_layers": 4, "norm_epsilon": 0.5}),
        ({}, {"vocab_size": 100}, {"vocab_size": 100, "padded_vocab_size": 128}),
        ({"tensor_model_parallel_size": 2}, {"vocab_size": 129, "world_size": 2}, {"padded_vocab_size": 256}),
        ({"vocab_size": 128}, {"vocab_size": 100}, {"vocab_size": 128, "padded_vocab_size": 128}),
        ({"max_position_embeddings": 64}, {}, {"max_position_embeddings": 64}),
        ({}, {}, {"max_position_embeddings": 32}),
        ({"attention_dropout": 0.0, "hidden_dropout": 0.0}, {}, {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
        (
            {"pipeline_model_parallel_size": 2, "num_layers": 8, "num_layers_per_virtual_pipeline_stage": 2},
            {"world_size": 2},
            {"num_virtual_stages_per_pipeline_rank": 2},
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_layers": 8, "num_virtual_stages_per_pipeline_rank": 4},
            {"world_size": 2},
            {"num_layers_per_virtual_pipeline_stage": 1},
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_layers": 8, "num_virtual_stages_per_pipeline_rank": 3},
            {"world_size": 2},
            {"num_layers_per_virtual_pipeline_stage": None},
        ),
        *(
            (
                {
                    **{f"account_for_{what}_in_pipeline_split": True for what in counted},
                    **{"pipeline_model_parallel_size": 4, "num_layers": 16 - len(counted)},
                    "num_layers_per_virtual_pipeline_stage": 2,
                },
                {"world_size": 4},
                {"num_virtual_stages_per_pipeline_rank": 2},
            )
            for counted in ((), ("embedding",), ("loss",), ("embedding", "loss"))
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t|tL"},
            {"world_size": 2},
            {"num_virtual_stages_per_pipeline_rank": 2},
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|ttL"},
            {"world_size": 2},
            {"num_virtual_stages_per_pipeline_rank": None},
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|t|tL"},
            {"world_size": 2},
            {"num_virtual_stages_per_pipeline_rank": None},
        ),
        ({"context_parallel_size": 2}, {"world_size": 2}, {"cp_comm_type": ("a2a",)}),
        ({"context_parallel_size": 2, "attention_dropout": 0.0}, {"world_size": 2}, {"cp_comm_type": ("p2p",)}),
        ({"context_parallel_size": 4}, {"world_size": 4}, {"cp_comm_type": ("p2p",)}),
        (
            {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
            {"world_size": 4},
            {"cp_comm_type": ("p2p",)},
        ),
        (
            {"context_parallel_size": 2, "group_query_attention": True, "num_query_groups": 3},
            {"world_size": 2},
            {"cp_comm_type": ("p2p",)},
        ),
        ({"cp_comm_type": ("allgather", "p2p")}, {}, {"cp_comm_type": ("all_gather", "p2p")}),
        *(
            ({"transformer_impl": "transformer_engine", name: value}, {}, {"transformer_impl": "local"})
            for name, value in (
                ("num_experts", 4),
                ("use_megatron_fsdp", True),
                ("use_torch_fsdp2", True),
                ("fp8_format", "e4m3"),
                ("reset_attention_mask", True),
                ("reset_position_ids", True),
            )
        ),
        ({"transformer_impl": "transformer_engine"}, {}, {"transformer_impl": "transformer_engine"}),
        ({"recompute_activations": True}, {}, {"recompute_granularity": "selective"}),
        (
            {"recompute_activations": True, "recompute_granularity": "full"},
            {},
            {"recompute_granularity": "full"},
        ),
        ({}, {}, {"check_weight_hash_across_dp_replicas_interval": 1000}),
        (
            {"check_weight_hash_across_dp_replicas_interval": 0},
            {},
            {"check_weight_hash_across_dp_replicas_interval": 0},
        ),
        *(
            ({scheme: True}, {}, {"check_weight_hash_across_dp_replicas_interval": None})
            for scheme in ("use_megatron_fsdp", "use_torch_fsdp2")
        ),
        ({"bf16": True}, {}, {"grad_reduce_in_bf16": False, "accumulate_allreduce_grads_in_fp32": True}),
        (
            {"bf16": True, "main_grads_dtype": "bf16"},
            {},
            {"grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": False},
        ),
        (
            {"bf16": True, "grad_reduce_in_bf16": True},
            {},
            {"grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": False},
        ),
        ({"skip_train": True}, {}, {"no_load_optim": True}),
        ({"skip_train": True, "no_load_optim": False}, {}, {"no_load_optim": True}),
        ({"skip_train": False}, {}, {"no_load_optim": False}),
        ({"use_megatron_fsdp": True}, {}, {"data_parallel_sharding_strategy": "optim_grads_params"}),
        ({"step_batch_size_schedule": "0:4 64:8 640:16"}, {}, {"global_batch_size": 16}),
        ({"step_batch_size_schedule": "0:4 64:8", "global_batch_size": 12}, {}, {"global_batch_size": 12}),
        ({"step_batch_size_schedule": "64:8"}, {"world_size": 2}, {"global_batch_size": 4}),
        ({"save": "x"}, {}, {"metrics_file": "x/metrics.jsonl"}),
        ({"save": "x", "metrics_file": "y"}, {}, {"metrics_file": "y"}),
        ({"load": "x"}, {}, {"metrics_file": None}),
        ({"split": " '9,1,0\" "}, {}, {"split": "9,1,0"}),
        ({"num_attention_heads": 7}, {}, {"kv_channels": None}),
    ],
)
def test_what_follows_from_what_was_typed(
    typed: dict[str, Any], facts: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = resolve({**BASE, **typed}, Facts(**facts))
    found: dict[str, Any] = {}
    for group in vars(config).values():
        found |= vars(group)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("device", "cuda", "on_cpu"),
    [("cpu", True, True), ("cpu", False, True), ("auto", True, False), ("auto", False, True), ("cuda", False, False)],
)
def test_which_device_a_run_is_on(device: str, cuda: bool, on_cpu: bool) -> None:
    assert runs_on_cpu(Config(layout=LayoutConfig(device=device)), Facts(cuda_available=cuda)) == on_cpu


@pytest.mark.parametrize(
    ("typed", "cuda", "adds"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"device": "cpu"}, True, False),
        ({"device": "cuda"}, False, True),
        ({"gradient_accumulation_fusion": False}, True, False),
        ({"gradient_accumulation_fusion": True}, False, True),
        ({"no_gradient_accumulation_fusion": True}, True, False),
        ({"use_torch_fsdp2": True}, True, False),
        ({"torch_compile": True}, True, False),
        ({"transformer_impl": "transformer_engine"}, True, False),
        ({"sequence_parallel_keep_gathered": True}, True, False),
    ],
)
def test_where_products_add_weight_gradients(typed: dict[str, Any], cuda: bool, adds: bool) -> None:
    config = resolve({**BASE, **typed}, Facts(cuda_available=cuda))
    assert config.training.gradient_accumulation_fusion == adds


def test_a_checkpoints_flags_stand_where_none_is_typed() -> None:
    """--use-checkpoint-args: what was typed stays, for a rule to name it."""
    saved = {"num_layers": 9, "hidden_size": 64, "tokenizer_type": "NullTokenizer", "tokenizer_model": "x", "lr": 0.5}
    given = {"use_checkpoint_args": True, "hidden_size": 32}
    assert adopt(given, saved) == {
        **given,
        **{"num_layers": 9, "tokenizer_type": "NullTokenizer", "tokenizer_model": "x"},
    }
    without = {**given, "no_use_tokenizer_model_from_checkpoint_args": True}
    assert adopt(without, saved) == {**without, "num_layers": 9}
    own = {**given, "tokenizer_type": "HuggingFaceTokenizer"}
    assert adopt(own, saved) == {**own, "num_layers": 9}
    assert adopt({"hidden_size": 32}, saved) == {"hidden_size": 32}


@pytest.mark.parametrize(
    ("typed", "saved", "expected"),
    [
        ({"lr": 1.0}, {"lr": 0.5, "train_iters": 70}, {"lr": 0.5, "lr_decay_iters": 70}),
        ({"lr": 1.0}, {"train_iters": 70}, {"lr_decay_iters": 70}),
        ({}, {"train_samples": 70, "train_iters": 5}, {"lr_decay_samples": 70}),
        ({}, {"lr_decay_iters": 30, "train_iters": 70}, {"lr_decay_iters": 30}),
        (
            {},
            {"lr": 0.5, "lr_scale_rule": "sqrt", "lr_scale_base_batch_size": 8, "train_iters": 70},
            {"lr": 0.5, "lr_decay_iters": 70},
        ),
    ],
)
def test_a_checkpoints_curves_take_the_place_of_all_that_were_typed(
    typed: dict[str, Any], saved: dict[str, Any], expected: dict[str, Any]
) -> None:
    asked = {"use_checkpoint_opt_param_scheduler": True, "seed": 3}
    assert adopt({**asked, **typed}, saved) == {**asked, **expected}


def test_rows_of_positions_count_where_they_are_learned() -> None:
    for saved, counts in (
        ({}, True),
        ({"position_embedding_type": "learned_absolute"}, True),
        ({"position_embedding_type": "rope"}, False),
    ):
        for finetune in (True, False):
            assert ("max_position_embeddings" in model_names(saved, finetune=finetune)) == counts
            assert ("rotary_base" in model_names(saved, finetune=finetune)) == (not finetune)


@pytest.mark.parametrize("text", ["num_layers: x\n", "num_layers: [\n", "num_layers: 1\nnum_layers: 2\n"])
def test_a_checkpoints_flags_that_cannot_be_read_are_left_to_the_loading(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert read_saved(tmp_path / "config.yaml") is None
    (tmp_path / "config.yaml").write_text("num_layers: 2\nof_another_version: 3\noptimizer: mine\n")
    assert read_saved(tmp_path / "config.yaml") == {"num_layers": 2, "optimizer": "mine"}
    assert read_saved(tmp_path / "nowhere.yaml") is None


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], ((), None)),
        (["a"], (("a",), None)),
        (["a", "b"], (("a", "b"), None)),
        (["1", "a", "b"], (("1", "a", "b"), None)),
        (["0.3", "a", "2", "b"], (("a", "b"), (0.3, 2.0))),
        (["a", "b", "c"], (("a", "b", "c"), None)),
        (["1", "b"], (("b",), (1.0,))),
        (["0.5", "a", "x", "b"], "'x' stands where a weight should be; write: weight prefix weight prefix ..."),
        (["x", "a", "0.5", "b"], "'x' stands where a weight should be; write: weight prefix weight prefix ..."),
        (["0", "a", "1", "b"], "weights must be positive, not 0 1"),
        (["-1", "a"], "weights must be positive, not -1"),
        (["inf", "a"], "weights must be positive, not inf"),
        (["nan", "a"], "weights must be positive, not nan"),
    ],
)
def test_blends(items: list[str], expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=r"\S") as error:
            read_blend(items)
        assert str(error.value) == expected
        return
    found = read_blend(items)
    assert (found.prefixes, found.weights) == expected


def test_every_file_that_flags_name_is_looked_for(tmp_path: Path) -> None:
    """Behind a URL too; a store is asked later, and a blend that is wrong is named elsewhere."""
    here = str(tmp_path / "here")
    for suffix in (".bin", ".idx"):
        Path(here + suffix).touch()
    half = str(tmp_path / "half")
    Path(half + ".bin").touch()
    typed = {
        "data_path": ("1", "s3://bucket/a", "2", "nowhere"),
        "train_data_path": ("gs://bucket/a", here, half),
        "valid_data_path": ("1", "a", "x", "b"),
        "test_data_path": ("a/c://d",),
        "data_args_path": "list",
        "per_split_data_args_path": here + ".bin",
        "eval_tasks": "tasks.yaml",
        "sample_prompts": "prompts",
        "save": "not looked for",
    }
    assert missing_paths(typed) == (
        "--data-path nowhere.bin",
        "--data-path nowhere.idx",
        f"--train-data-path {half}.idx",
        "--test-data-path a/c://d.bin",
        "--test-data-path a/c://d.idx",
        "--data-args-path list",
        "--eval-tasks tasks.yaml",
        "--sample-prompts prompts",
    )


def test_two_lists_do_not_name_the_same_data(tmp_path: Path) -> None:
    """And the file is read once, whatever is wrong with it."""
    parts, words = tmp_path / "parts.json", tmp_path / "words"
    parts.write_text('{"train": "", "valid": null}')
    words.write_text("a b")
    flags = ["--per-split-data-args-path", str(parts), "--data-args-path", str(words)]
    assert parse(flags).values == {"data_path": ("a", "b")}
    parts.write_text('{"valid": ["a"]}')
    typed = read(flags)
    assert typed.values == {"data_path": ("a", "b")}, "what cannot be read is not looked for again"
    assert len(typed.problems) == 1
    parts.write_text('{"train": 0}')
    [problem] = read(flags).problems
    assert "train is not a list" in problem


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("{task: LAMBADA, valid_data: FILE, overlapping_eval: 0}", "a: overlapping_eval is 0; give at least 1"),
        ("{task: LAMBADA, valid_data: FILE, overlapping_eval: true}", "a: overlapping_eval is True, no whole number"),
        ("{task: LAMBADA, valid_data: FILE, overlapping_eval: 1.0}", "a: overlapping_eval is 1.0, no whole number"),
        ("{task: LAMBADA, valid_data: FILE, strict_lambada: 1}", "a: strict_lambada is 1; give true or false"),
        ("{task: LAMBADA, valid_data: [FILE, 3]}", "a: valid_data is no path, nor a list of paths"),
        ("{task: LAMBADA, valid_data: FOLDER}", "a: FOLDER is no file"),
        ("{task: LAMBADA}", "a: no valid_data; name at least one file"),
        ("{task: LAMBADA, valid_data: FILE, overlapping_eval: 1}", None),
        ("{task: LAMBADA, valid_data: [FILE, FILE], strict_lambada: null}", None),
    ],
)
def test_one_task_among_those_that_can_be_done(task: str, problem: str | None, tmp_path: Path) -> None:
    """The wrong one is the second of three."""
    file, path = tmp_path / "x.jsonl", tmp_path / "tasks.yaml"
    file.touch()
    right = f"{{task: LAMBADA, valid_data: {file}}}"
    task = task.replace("FILE", str(file)).replace("FOLDER", str(tmp_path))
    path.write_text(f"first: {right}\na: {task}\nlast: {right}\n")
    if problem is None:
        assert [one.name for one in read_eval_tasks(str(path))] == ["first", "a", "last"]
        return
    with pytest.raises(ConfigurationError) as error:
        read_eval_tasks(str(path))
    assert error.value.problems == [f"--eval-tasks {path}: {problem.replace('FOLDER', str(tmp_path))}"]
    path.write_text("{}\n")
    assert look_at_eval_tasks(str(path))[1][0].startswith(f"--eval-tasks {path}: it names no task")


def test_a_file_of_a_run_has_every_value_that_is_there() -> None:
    """False and 0 too; a metrics file next to the checkpoints follows --save, and another one is kept."""
    given = {**BASE, "save": "runs/a", "hidden_dropout": 0.0, "eval_iters": 0}
    text = to_yaml(resolve(given, Facts(world_size=3)))
    assert text.startswith(
        "# Configuration of a run on 3 ranks; pass it back with --config.\n\n# model\nnum_layers: 4\n"
    )
    for line in ("hidden_dropout: 0.0", "eval_iters: 0", "swiglu: false", "save: runs/a"):
        assert f"\n{line}\n" in text
    assert "world_size" not in text
    assert "metrics_file" not in text
    assert "metrics_file: elsewhere\n" in to_yaml(resolve({**given, "metrics_file": "elsewhere"}, Facts()))
