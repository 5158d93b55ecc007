"""A flag that is accepted and does nothing is a defect: every field of the schema is read somewhere."""

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.schema import Config
from tests.support.syntax import nodes_of, source

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_ext"
# Checking a value, or showing it, is not using it.
NOT_USES = ("config/schema/", "rules/", "plan/dry_run.py", "config/parse/help_text.py", "config/parse/reference.py")
# Used by what they stand for rather than by name.
BY_CONSTRUCTION = {
    "exit_signal_handler": "SIGTERM always saves and stops; the help says that the flag changes nothing",
    "ckpt_format": "one format, and the flag's only choice",
    "non_persistent_ckpt_type": "one kind, and the flag's only choice: the rules ask for it",
    "use_checkpoint_args": "config/parse/saved.py reads it among the typed values, before there is a configuration",
    **dict.fromkeys(
        ("data_args_path", "per_split_data_args_path"),
        "config/parse/data_lists.py reads them among the typed values, and puts what they list in their place",
    ),
    "test_data_path": "data/corpus.py reads `{split}_data_path`",
    "train_data_path": "data/corpus.py reads `{split}_data_path`",
    "valid_data_path": "data/corpus.py reads `{split}_data_path`",
    "num_layers_per_virtual_pipeline_stage": "resolve turns it into num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_virtual_pipeline_stage": "read through microbatch_group_size",
    "num_virtual_stages_per_pipeline_rank": "read through virtual_pipeline_model_parallel_size",
    "group_query_attention": "read through num_key_value_heads",
    "num_query_groups": "read through num_key_value_heads",
    "expert_tensor_parallel_size": "read through expert_tensor_size",
    "moe_ffn_hidden_size": "read through expert_ffn_hidden_size",
    "moe_router_load_balancing_type": "read through load_balancing_coefficient",
    "moe_aux_loss_coeff": "read through load_balancing_coefficient",
    "grad_reduce_in_bf16": "resolve leaves accumulate_allreduce_grads_in_fp32 off",
    "main_grads_dtype": "resolve turns it into grad_reduce_in_bf16",
    "make_vocab_size_divisible_by": "resolve turns it into padded_vocab_size",
    "lr_scale_base_batch_size": "config/derived/lr_scale.py reads it among the typed values, and the rates are scaled",
    "recompute_activations": "resolve turns it into recompute_granularity",
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), "types of Adam's states, which the registry reads by name"),
    **dict.fromkeys(
        ("vocab_file", "merge_file", "tiktoken_pattern", "tiktoken_num_special_tokens"),
        "the tokenizers read them of TokenizerFlags, which has the same names",
    ),
    # tests/unit/test_optimizers.py shows that each arrives at its torch optimizer.
    **{name: f"{traits.title} reads it" for traits in OPTIMIZERS.values() for name in traits.flags},
}
GROUPS: dict[str, Any] = {group.name: group.type for group in dataclasses.fields(Config)}
FIELDS = [(group, field.name) for group, kind in GROUPS.items() for field in dataclasses.fields(kind)]


def reads(text: str) -> set[tuple[str, str]]:
    """Fields that a file reads, with the group that it reads them of: `config.data.seed`, or `data.seed` where `data`
    was assigned the group or is annotated with its class. An attribute of anything else that has the same name is none.
    """
    nodes = nodes_of(text)
    known = dict(_bindings(nodes))
    return {
        (group, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if (group := _group(node.value) or known.get(_name(node.value)))
    }


def _name(node: ast.AST) -> str:
    """Return `a` or `a.b`; nothing for what is no such name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _bindings(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield what a file has for a group, and the group."""
    classes = {kind.__name__: group for group, kind in GROUPS.items()}
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else _name(node.target)
            annotation = ast.unparse(node.annotation)
            yield from ((name, group) for kind, group in classes.items() if kind in annotation)
        elif isinstance(node, ast.Assign | ast.NamedExpr):
            target, value = node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value
            pairs: Iterable[tuple[ast.expr, ast.expr]] = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = zip(target.elts, value.elts, strict=True)
            yield from ((_name(one), group) for one, of in pairs if (group := _group(of)))


def _group(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) and node.attr in GROUPS else None


def test_the_fields_are_read() -> None:
    files = (path for path in PACKAGE.rglob("*.py") if not any(part in path.as_posix() for part in NOT_USES))
    read = {field for path in files for field in reads(source(path))}
    asked = [field for field in FIELDS if field[1] not in BY_CONSTRUCTION]
    assert len(asked) > 200
    unread = [f"--{name.replace('_', '-')} ({group})" for group, name in asked if (group, name) not in read]
    assert unread == [], "these flags are accepted and do nothing"


def test_an_attribute_of_the_same_name_is_no_use() -> None:
    text = """
def f(run, flags: CheckpointConfig):
    layout, seed = run.config.layout, run.loader.seed
    torch.save(parser.save), layout.world_size, flags.load, run.config.training.lr_decay_style
"""
    expected = {("layout", "world_size"), ("checkpoint", "load"), ("training", "lr_decay_style")}
    assert reads(text) == expected


def test_the_exceptions_are_fields() -> None:
    assert set(BY_CONSTRUCTION) <= {name for _, name in FIELDS}
