"""tools/parity.py's comparison on records made by hand: where two runs differ first, and the flags of both runs."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from megatron_ext.config.parse.options import options
from megatron_ext.plugins.prove import gather
from megatron_ext.plugins.prove.first_difference import Comparison, Proof, comparison, relative, to_flags
from megatron_ext.plugins.prove.gather import LOSS, ModuleOutput, Shard, assemble_outputs, forward_order
from megatron_ext.plugins.prove.recorded_training import RunRecord
from tests.support.small_models import LLAMA, small_config

RUN = RunRecord(
    losses=[5.0, 4.0, 3.0],
    grad_norms=[1.0, 2.0, 0.5],
    validation_loss=4.5,
    weights={"a": np.array([3.0, 4.0], np.float32), "b": np.ones(2, np.float32)},
    gradients={"a": np.array([0.3, 0.4], np.float32), "b": np.array([0.0, 2.0], np.float32)},
    flaws=(),
    outputs={"one": [np.ones((1, 2, 2), np.float32)], "two": [np.full((1, 2, 2), 2.0, np.float32)]},
)
TOLERANCE = 1e-5


def proof(**changes: Any) -> Proof:
    return Proof(RUN, dataclasses.replace(RUN, **changes), TOLERANCE)


def scaled(values: dict[str, np.ndarray], **factors: float) -> dict[str, np.ndarray]:
    return {name: value * np.float32(factors.get(name, 1.0)) for name, value in values.items()}


def test_runs_that_agree_differ_nowhere() -> None:
    assert proof().first_difference() is None


FAR = 1 + 4e-5
TWO = RUN.outputs["two"][0]
FIRST = [
    # What is changed, and the kind, the name and the words of what is found.
    (
        {"weights": scaled(RUN.weights, b=1 + 1e-7)},
        "initial weight",
        "b",
        "the initial weight b is 1.2e-07 of its norm off",
    ),
    (
        {"weights": scaled(RUN.weights, a=2, b=2)},
        "initial weight",
        "a",
        "the initial weight a is 1.0e+00 of its norm off",
    ),
    (
        {"outputs": {"one": RUN.outputs["one"], "two": [TWO, TWO * np.float32(1.5)]}},
        "output",
        "two",
        "in forward order, the output of two is 5.0e-01 of its norm off",
    ),
    (
        {"losses": [5.0 + 6e-6, 4.0, 3.0]},
        "loss",
        "loss",
        "every token's loss agrees, but their mean is 5.000006 instead of 5: the sum over the ranks, or the number of "
        "tokens that it is divided by",
    ),
    (
        {"gradients": scaled(RUN.gradients, a=2, b=2)},
        "gradient",
        "b",
        "in backward order, the gradient of b is 1.0e+00 of its norm off; all gradients are 2 times what they should "
        "be: a scale or a denominator",
    ),
    (
        {"gradients": scaled(RUN.gradients, a=2)},
        "gradient",
        "a",
        "in backward order, the gradient of a is 1.0e+00 of its norm off; 1 of 2 gradients differ: a",
    ),
    (
        {"gradients": scaled(RUN.gradients, a=2, b=3)},
        "gradient",
        "b",
        "in backward order, the gradient of b is 2.0e+00 of its norm off; 2 of 2 gradients differ: b, a",
    ),
    (
        {"flaws": ("first gradients: b: ranks disagree", "final weights: a: ranks disagree")},
        "disagreement",
        "b",
        "ranks that should hold the same do not: first gradients: b: ranks disagree",
    ),
    (
        {"losses": [5.0, 4.0 * FAR, 3.0]},
        "step",
        "step 2",
        "the first step's gradients agree, but at step 2 the loss is 4.00016 instead of 4: the update of the weights, "
        "or rounding that a large learning rate amplifies",
    ),
    (
        {"grad_norms": [1.0, 2.0, None]},
        "step",
        "step 3",
        "the first step's gradients agree, but at step 3 the gradient norm is nan instead of 0.5: the update of the "
        "weights, or rounding that a large learning rate amplifies",
    ),
]


@pytest.mark.parametrize(("changes", "what", "name", "sentence"), FIRST, ids=[f"{row[1]} {row[2]}" for row in FIRST])
def test_the_first_difference_is_told_exactly(changes: dict[str, Any], what: str, name: str, sentence: str) -> None:
    found = proof(**changes).first_difference()
    assert found is not None
    assert (found.what, found.name, found.sentence) == (what, name, sentence)


def test_what_comes_earlier_in_a_step_is_told_first() -> None:
    """Each kind of difference on top of all that come after it."""
    changes: dict[str, Any] = {}
    for more, what in reversed([({**row[0]}, row[1]) for row in (FIRST[0], FIRST[2], FIRST[3], FIRST[4], FIRST[7])]):
        changes |= more
        found = proof(**changes).first_difference()
        assert found is not None
        assert found.what == what


@pytest.mark.parametrize(
    "near",
    [
        {"outputs": {"one": [RUN.outputs["one"][0] * np.float32(1 + 5e-6)], "two": RUN.outputs["two"]}},
        {"losses": [5.0 + 4e-6, 4.0, 3.0]},  # a tenth of the tolerance, of 5
        {"gradients": scaled(RUN.gradients, a=1 + 5e-6)},
        {"losses": [5.0, 4.0 * (1 + 9e-6), 3.0]},
        {"grad_norms": [1.0, 2.0, 0.5 + 9e-6]},  # of numbers below 1, the distance itself
        {"validation_loss": 9.0},
    ],
)
def test_what_is_within_the_tolerance_is_no_difference(near: dict[str, Any]) -> None:
    assert proof(**near).first_difference() is None


@pytest.mark.parametrize("field", ["weights", "outputs", "gradients", "losses", "grad_norms"])
def test_nan_is_a_difference_everywhere(field: str) -> None:
    value = getattr(RUN, field)
    if field == "losses" or field == "grad_norms":
        wrong: Any = [*value[:-1], math.nan]
    elif field == "outputs":
        wrong = {**value, "two": [value["two"][0], np.full((1, 2, 2), math.nan, np.float32)]}
    else:
        wrong = {**value, "b": np.full(2, math.nan, np.float32)}
    assert proof(**{field: wrong}).first_difference() is not None


def test_a_first_loss_of_nan_is_told_as_a_loss() -> None:
    found = proof(losses=[math.nan, 4.0, 3.0]).first_difference()
    assert found is not None
    assert found.what == "loss"


def test_outputs_that_a_layout_does_not_have_alike_are_not_compared() -> None:
    """A module that is not there, or of another shape: nothing is said of it, and of the others everything."""
    found = proof(outputs={"two": [np.full((1, 2, 2), 3.0, np.float32)]})
    assert found.outputs == {"two": 0.5}
    assert proof(outputs={"one": [np.ones((2, 2, 2), np.float32)], "two": [TWO]}).outputs == {"two": 0.0}


def test_gradients_are_told_in_backward_order() -> None:
    assert list(proof().gradients) == ["b", "a"]
    assert list(proof().weights) == ["a", "b"]


def test_many_gradients_that_differ_are_cut_after_twelve() -> None:
    many = {str(number): np.ones(2, np.float32) for number in range(13)}
    known = dataclasses.replace(RUN, gradients=many)
    for changed, rest in (
        (13, "12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, ..."),
        (12, "11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0"),
    ):
        wrong = {name: value * np.float32(2 + int(name) if int(name) < changed else 1) for name, value in many.items()}
        found = Proof(known, dataclasses.replace(known, gradients=wrong), TOLERANCE).first_difference()
        assert found is not None
        assert found.sentence.endswith(f"; {changed} of 13 gradients differ: {rest}")


def test_a_reference_of_zero_must_be_met_exactly() -> None:
    zero, other = np.zeros(3, np.float32), np.array([0, 0, 1e-30], np.float32)
    assert (relative(zero, zero), relative(other, zero)) == (0.0, math.inf)
    assert relative(np.array([3.0, 0.0]), np.array([3.0, 4.0])) == 4.0 / 5.0


FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --mock-data --vocab-size 100"
)


def both(more: str, world_size: int | None = None) -> Comparison:
    return comparison(f"{FLAGS} {more}".split(), world_size)


def test_the_one_process_does_without_the_layout_and_without_what_saves_memory() -> None:
    found = both(
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2 --bf16 --save a --log-interval 5 --metrics-file b --hidden-dropout 0"
    )
    same = {
        *FLAGS.split(),
        "0.001",
        "--mock-data=true",
        "--hidden-dropout",
        "0.0",
        "--attention-dropout",
        "--eval-iters",
    }
    same |= {"0", "--global-batch-size"}
    assert set(found.reference) <= same - {"--mock-data", "1e-3"}
    apart = [word for word in found.other if word not in found.reference]
    assert apart == [
        "--tensor-model-parallel-size", "--sequence-parallel=true", "--recompute-granularity", "full",
        "--recompute-method", "uniform", "--recompute-num-layers",
    ]  # fmt: skip
    assert found.world_size == 2
    assert found.changed == ("without --bf16", "--attention-dropout 0", "--eval-iters 0")
    kept = {option.name for option in options() if option.group == "layout" or option.saves_memory}
    words = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in found.reference if word[:2] == "--"}
    assert not kept & words


def test_both_runs_have_the_layouts_global_batch() -> None:
    for more, ranks, batch in (("", 2, "4"), ("", 4, "8"), ("--global-batch-size 16", 2, "16")):
        found = both(more, ranks)
        for words in (found.reference, found.other):
            assert words[words.index("--global-batch-size") + 1] == batch


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ("", 2),
        ("--tensor-model-parallel-size 4", 4),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
        ("--context-parallel-size 2 --pipeline-model-parallel-size 4", 8),
        ("--num-experts 4 --disable-bias-linear --expert-model-parallel-size 4", 4),
        ("--world-size 6", 6),
        ("--world-size 1", 2),
    ],
)
def test_a_layout_gets_the_fewest_ranks_that_it_needs(more: str, ranks: int) -> None:
    assert both(more).world_size == ranks


def test_typed_values_become_the_flags_that_were_typed() -> None:
    values = {"mock_data": True, "sequence_parallel": False, "cp_comm_type": ("p2p", "a2a"), "num_layers": 3}
    assert to_flags(values) == [
        "--mock-data=true", "--sequence-parallel=false", "--cp-comm-type", "p2p", "a2a", "--num-layers", "3",
    ]  # fmt: skip


# Outputs of modules: S sequence, B samples, W width of what each rank holds.


def numbered(samples: int, length: int, width: int) -> np.ndarray:
    """A whole output, [samples, sequence, width], each number another."""
    return np.arange(samples * length * width, dtype=np.float32).reshape(samples, length, width)


def parts_of(
    name: str, whole: np.ndarray, sizes: tuple[int, int, int, int], divided: str, stride: int = 1
) -> list[ModuleOutput]:
    """What the ranks of tensor, context and data parallelism hold of an output, with a micro batch of 1.

    Sample m x DP + r is that of microbatch m and data-parallel rank r; of 2 c chunks of the sequence context-parallel
    rank r has the numbers r and 2 c - 1 - r.
    """
    tensor, context, data, microbatches = sizes
    found = []
    for microbatch in range(microbatches):
        for dp in range(data):
            sample = whole[microbatch * data + dp]
            chunks = np.split(sample, 2 * context)
            for cp in range(context):
                mine = sample if context == 1 else np.concatenate([chunks[cp], chunks[2 * context - 1 - cp]])
                for tp in range(tensor):
                    part = mine
                    if divided == "sequence":
                        part = np.split(mine, tensor)[tp]
                    elif divided == "width":
                        part = np.concatenate(
                            [np.split(half, tensor, axis=1)[tp] for half in np.split(mine, stride, axis=1)], 1
                        )
                    found.append(ModuleOutput(name, microbatch, (tp, cp, dp), part[:, None]))
    return found


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 3, 2), (1, 2, 1, 3), (2, 2, 2, 2)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_outputs_of_all_ranks_become_whole_ones(sizes: tuple[int, int, int, int], sequence_parallel: bool) -> None:
    tensor, _, data, microbatches = sizes
    config = small_config(LLAMA, {"sequence_parallel": sequence_parallel})
    layer = "decoder.layers.1"
    along = "sequence" if sequence_parallel else ""
    kinds = {
        "embedding": (along, 1),
        f"{layer}.input_layernorm": (along, 1),
        f"{layer}.self_attention.linear_qkv": ("width", 1),
        f"{layer}.self_attention.core_attention": ("width", 1),
        f"{layer}.self_attention.linear_proj": (along, 1),
        f"{layer}.mlp.linear_fc1": ("width", 2),
        f"{layer}.mlp.linear_fc2": (along, 1),
        f"{layer}.mlp": (along, 1),
        layer: (along, 1),
        "decoder.final_layernorm": (along, 1),
        LOSS: ("", 1),
    }
    wholes = {name: numbered(data * microbatches, 8, 8) + place for place, name in enumerate(kinds)}
    parts = [part for name, how in kinds.items() for part in parts_of(name, wholes[name], sizes, *how)]
    found = assemble_outputs(config, reversed(parts))
    assert list(found) == [name for name in forward_order(config) if name in kinds] == list(kinds)
    for name, (divided, _) in kinds.items():
        assert len(found[name]) == (1 if divided else tensor), name
        for replica in found[name]:
            np.testing.assert_array_equal(replica, wholes[name], err_msg=name)


def test_the_first_matrix_without_a_gate_is_divided_once() -> None:
    whole = numbered(1, 4, 8)
    parts = parts_of("decoder.layers.0.mlp.linear_fc1", whole, (2, 1, 1, 1), "width")
    np.testing.assert_array_equal(assemble_outputs(small_config(), parts)[parts[0].name][0], whole)


def test_a_shard_is_numbered_among_those_that_share_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts may be whole on each of several tensor-parallel ranks."""
    asked: list[bool] = []

    def tensor_group(_groups: Any, *, expert: bool) -> Any:
        asked.append(expert)
        return SimpleNamespace(rank=lambda: 0 if expert else 3)

    monkeypatch.setattr(gather, "tensor_group", tensor_group)
    run: Any = SimpleNamespace(groups=None)
    of_expert = gather._shard(run, "decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight", torch.ones(2))
    dense = gather._shard(
        run, "decoder.layers.0.mlp.shared_experts.linear_fc1.weight", torch.zeros(2, dtype=torch.bfloat16)
    )
    assert (of_expert.tp_rank, dense.tp_rank, asked) == (0, 3, [True, False])
    assert isinstance(dense, Shard)
    assert dense.values.dtype == np.float32


def test_a_copy_shares_no_memory_with_the_tensor() -> None:
    tensor = torch.zeros(3)
    copy = gather.copied(tensor)
    tensor += 1
    assert copy.tolist() == [0.0, 0.0, 0.0]


class Layer(torch.nn.Module):
    """A layer with two of the modules whose outputs are compared, and one whose are not."""

    def __init__(self, number: int):
        super().__init__()
        self.layer_number = number
        self.input_layernorm, self.other = torch.nn.Identity(), torch.nn.Identity()

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.other(self.input_layernorm(hidden) + self.layer_number), None


class Chunk(torch.nn.Module):
    """The layers 3 and 4 of a model, with the loss of every token, [samples, sequence], behind them."""

    def __init__(self, *, post_process: bool):
        super().__init__()
        self.decoder, self.post_process = torch.nn.Module(), post_process
        self.decoder.layers = torch.nn.ModuleList([Layer(3), Layer(4)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:  # pyright: ignore[reportGeneralTypeIssues]
            hidden, _ = layer(hidden)
        return hidden[:, :, 0].t() if self.post_process else hidden


@pytest.mark.parametrize("post_process", [False, True])
def test_outputs_are_copied_with_their_global_names_and_places(
    post_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "unwrapped", lambda chunks: chunks)
    group = {name: SimpleNamespace(rank=lambda rank=rank: rank) for rank, name in enumerate(("tp", "cp", "dp"), 5)}
    chunk = Chunk(post_process=post_process)
    taps = gather.Taps(SimpleNamespace(groups=SimpleNamespace(**group), chunks=[chunk]))  # pyright: ignore
    for microbatch in range(2):
        chunk(torch.full((4, 2, 3), 10.0 * microbatch))
    taps.close()
    chunk(torch.zeros(4, 2, 3))
    names = [
        "decoder.layers.2.input_layernorm",
        "decoder.layers.2",
        "decoder.layers.3.input_layernorm",
        "decoder.layers.3",
    ]
    names += [LOSS] if post_process else []
    assert [(part.name, part.microbatch) for part in taps.parts] == [(n, m) for m in range(2) for n in names]
    assert {part.position for part in taps.parts} == {(5, 6, 7)}
    for part in taps.parts:
        assert part.values_SBW.shape == ((4, 2, 1) if part.name == LOSS else (4, 2, 3))
    assert [part.values_SBW[0, 0, 0] for part in taps.parts][:4] == [0.0, 3.0, 3.0, 7.0]


def test_what_is_recomputed_in_a_backward_pass_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "unwrapped", lambda chunks: chunks)
    group = SimpleNamespace(rank=lambda: 0)
    chunk = Chunk(post_process=False)
    run: Any = SimpleNamespace(groups=SimpleNamespace(tp=group, cp=group, dp=group), chunks=[chunk])
    taps = gather.Taps(run)
    hidden = torch.zeros(4, 2, 3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(chunk, hidden, use_reentrant=False).sum().backward()
    assert len(taps.parts) == 4
