"""What the search tries beyond stages that are alike, and what it says of its own assumptions."""

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner_searches import CASES, Case
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.hardware import Machine, hardware
from megatron_ext.cost.memory import estimate, stage_memory
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.workload import Workload
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner import plan_report
from megatron_ext.plugins.planner import search as search_module
from megatron_ext.plugins.planner.commands.plan import main
from megatron_ext.plugins.planner.estimate import at_least, formula_at_least, time_of
from megatron_ext.plugins.planner.layout_choices import RECOMPUTATIONS, SHARDINGS, flags, layouts
from megatron_ext.plugins.planner.layout_evaluation import evaluate_config
from megatron_ext.plugins.planner.plan_report import command, simpler, speed
from megatron_ext.plugins.planner.search import Answer, Question, search, simpler_layouts
from megatron_ext.plugins.planner.search_input import question
from megatron_ext.plugins.planner.sensitivity import alternatives, hinges, with_short_gradients
from megatron_ext.rules.run_rules import nothing_needed_is_missing, values_are_in_range, values_have_what_they_need
from megatron_ext.rules.validate import RULES, RULES_OF_LAYOUTS, RULES_OF_MICRO_BATCHES, RULES_OF_RECOMPUTATION
from tests.support import plans
from tests.support.golden_text import section
from tests.support.wrong_flags import BASE, EXAMPLES

# Of the second tier: tests/plugins/planner/test_search_answers.py plans.
pytestmark = pytest.mark.full

_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --vocab-size 128256"
)
BIG = f"--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 {_LLAMA}"
SMALL = f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {_LLAMA}"
_NOTHING_AGAIN = {name: None for choice in RECOMPUTATIONS.values() for name in choice}


def asked(world_size: int, line: str, memory_gb: float = 85.0) -> Question:
    machine = Machine(hardware("h100", memory_gb=memory_gb))
    return question(parse(line.split()).values, Facts(), world_size, machine, 0.92)


def test_126_layers_with_embedding_and_loss_divide_over_16_stages() -> None:
    """Llama 3 405B: 128 units are 16 stages of 8 chunks; the layers alone are not."""
    values = asked(16384, f"{BIG} --global-batch-size 2048").values
    given = {**values, "tensor_model_parallel_size": 8, "context_parallel_size": 1, "pipeline_model_parallel_size": 16}
    found = list(layouts(given, 16384, 8))
    assert found
    assert all(choice["account_for_embedding_in_pipeline_split"] for choice in found)
    assert all(choice["account_for_loss_in_pipeline_split"] for choice in found)
    assert {choice["num_virtual_stages_per_pipeline_rank"] for choice in found} == {None, 2, 8}


def test_the_405b_of_16384_is_as_fast_as_what_was_trained() -> None:
    """Dubey et al. 2024 (arXiv:2407.21783, table 4): TP8 PP16 took 6.46 s."""
    question = asked(16384, f"{BIG} --global-batch-size 2048 --tensor-model-parallel-size 8 --micro-batch-size 1")
    best = search(question, 3).best
    assert best[0].seconds < 6.46
    assert all(candidate.memory.total <= question.usable_bytes for candidate in best)


def test_a_batch_that_nothing_divides_has_alternatives() -> None:
    line = f"{SMALL} --global-batch-size 1024"
    said = "\n".join(alternatives(asked(1000, line)))
    assert "0 divide --global-batch-size 1,024" in said
    assert "--global-batch-size 1,000: data-parallel sizes" in said
    assert "devices and the same batch" in said
    assert alternatives(asked(1024, line)) == []
    with pytest.raises(ConfigurationError, match="--global-batch-size 1,000: data-parallel sizes"):
        main(["--world-size", "1000", "--", *line.split()])


@pytest.fixture(scope="module")
def eight() -> tuple[Question, Answer]:
    """Llama 3.1 8B on a node of 8."""
    question = asked(8, f"{SMALL} --global-batch-size 128")
    return question, search(question, 4)


def test_the_winner_hangs_on_what_another_assumption_would_change(eight: tuple[Question, Answer]) -> None:
    """The same layouts, the second put first: the assumption that it is best is broken at once."""
    question, answer = eight
    slowest = max(answer.contenders, key=lambda candidate: candidate.seconds)
    assert slowest.seconds > 1.005 * answer.best[0].seconds
    said = hinges(question, replace(answer, best=[slowest]))
    assert said[0] == "the winner hangs on assumptions:"
    assert any("10% more efficiency of matrix products" in line and "wins by" in line for line in said)


def test_the_speed_of_the_first_is_that_of_its_evaluation(eight: tuple[Question, Answer]) -> None:
    question, answer = eight
    exact = evaluate_config(answer.best[0].config, question.machine, question.usable_bytes)
    numbers = f"{exact.tokens_per_second:,.0f} tokens a second, {exact.tokens_per_second / 8:,.0f} a device"
    said = speed(answer.best[0], question.machine)
    assert said == f"1 trains {numbers}: {exact.mfu(full_attention=False):.1%} of the peak (causal attention)"


def test_what_lies_in_host_memory_is_said() -> None:
    """One device of 85 GB holds no 12 bytes a parameter of optimizer state next to the rest."""
    question = asked(1, f"{SMALL} --global-batch-size 16")
    first = search(question, 1).best[0]
    assert plan_report.name(first).endswith("micro batch 1, optimizer in host memory")
    kept = f"{12 * 8_030_261_248 / 1e9:.1f} GB"
    assert speed(first, question.machine).endswith(f"it keeps {kept} a device in host memory, up to {kept} a node")


def test_plain_ways_are_named_where_there_are_some() -> None:
    alone = asked(1, f"{SMALL} --global-batch-size 16")
    assert {each.sharding for each in simpler_layouts(alone)} == {"DDP"}  # one rank has nothing to share
    none = asked(64, f"{SMALL} --global-batch-size 32")
    said = simpler(simpler_layouts(none), none)
    assert said == ["no plain way is legal, with no TP, CP and PP but what was given, and the smallest micro batch"]


def test_words_that_the_tool_does_not_know_are_answered() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean --world-size\?"):
        main(["--wrld-size=8", "--", *SMALL.split()])
    with pytest.raises(ConfigurationError, match="--num-layers 2; training flags come after --"):
        main(["--world-size", "8", "--num-layers", "2"])


def test_what_gradients_of_2_bytes_make_possible(eight: tuple[Question, Answer]) -> None:
    """TP1 CP2 is what dgxc-benchmarking trains Llama 3.1 8B with; 4-byte gradients leave it no room (84.9 GB)."""
    question, answer = eight
    first = with_short_gradients(question, answer)[0]
    sizes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    assert [first.choice[size] for size in sizes] == [1, 2, 1]
    assert first.seconds < answer.best[0].seconds / 1.01
    assert first.memory.total <= question.usable_bytes
    assert command(first.choice).endswith("--grad-reduce-in-bf16")
    assert search_module.resolved(question, first.choice) == first.config
    exact = {**first.choice, "grad_reduce_in_bf16": None}
    assert memory_of(search_module.resolved(question, exact)) - first.memory.total == 2 * 8_030_261_248
    assert memory_of(search_module.resolved(question, exact)) > question.usable_bytes
    for given in ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"):
        assert with_short_gradients(replace(question, values={**question.values, given: True}), answer) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_what_was_trained_is_legal_and_takes_about_as_long_as_published(case: Case) -> None:
    found = case.trained()
    if case.seconds is not None:
        assert found.time.total == pytest.approx(case.seconds, rel=0.15)


def memory_of(config: Config) -> float:
    return estimate(config, fused=True)[1].total


def _unread(values: Any) -> tuple[Any, set[str]]:
    """Return the same values, and a set that fills with the names of those that are read."""
    names: set[str] = set()

    def read(self: Any, name: str) -> Any:
        names.add(name)
        return object.__getattribute__(self, name)

    kind = type("Watched", (type(values),), {"__getattribute__": read})
    watched = kind(**{field.name: getattr(values, field.name) for field in fields(values)})
    names.clear()
    return watched, names


def test_rules_that_a_search_does_not_ask_again_read_nothing_that_it_changes() -> None:
    """Over all wrong launches of the page of errors, whose rules take every turn."""
    of_every_value = {values_are_in_range, values_have_what_they_need, nothing_needed_is_missing}
    recomputation = {name for choice in RECOMPUTATIONS.values() for name in choice} | {"recompute_activations"}
    dividing = {name for choice in SHARDINGS.values() for name in choice} | {"num_distributed_optimizer_instances"}
    for line in ["", "--rampup-batch-size 8 8 64", *(wrong for wrong, _ in EXAMPLES.values())]:
        try:
            config = resolve(parse(shlex.split(f"{BASE} {line}")).values, Facts(cuda_available=True))
        except ConfigurationError:
            continue  # no value could be read
        for rule in set(RULES) - of_every_value:
            training, names = _unread(config.training)
            list(rule(replace(config, training=training), Facts(cuda_available=True)))
            assert rule in RULES_OF_RECOMPUTATION or not names & recomputation, (rule, line)
            assert rule in RULES_OF_MICRO_BATCHES or "micro_batch_size" not in names, (rule, line)
            layout, read = _unread(config.layout)
            list(rule(replace(config, layout=layout), Facts(cuda_available=True)))
            # Of a layer that is applied several times, the search asks these rules again for each scheme.
            is_asked = rule not in RULES_OF_RECOMPUTATION or config.model.mtp_use_repeated_layer
            assert is_asked or not read & dividing, (rule, line)
    for name in (*recomputation, "micro_batch_size"):
        assert options_by_name()[name].needs == ()


def test_rules_that_a_search_asks_once_read_nothing_that_it_chooses() -> None:
    """Over all wrong launches of the page of errors, as above."""
    of_every_value = {values_are_in_range, values_have_what_they_need, nothing_needed_is_missing}
    chosen = {name for choice in (*SHARDINGS.values(), *RECOMPUTATIONS.values()) for name in choice}
    chosen |= {"micro_batch_size", "num_distributed_optimizer_instances", "optimizer_cpu_offload"}
    for line in (EXPERTS, BIG, f"{SMALL} --global-batch-size 16"):
        question = asked(16, f"--global-batch-size 16 {line}")
        chosen |= {name for layout in layouts(question.values, 16, 8) for name in layout}
    configs = [each.config for each in search_module._candidates(question)]
    for group in fields(Config):
        held = [getattr(config, group.name) for config in configs]
        for name in (field.name for field in fields(held[0])):
            if len({getattr(values, name) for values in held}) > 1:
                chosen.add(name)  # what follows from what is chosen as well
    assert {"padded_vocab_size", "pipeline_model_parallel_size", "expert_model_parallel_size"} <= chosen
    assert "sequence_parallel_keep_gathered" not in chosen
    for line in ["", *(wrong for wrong, _ in EXAMPLES.values())]:
        try:
            config = resolve(parse(shlex.split(f"{BASE} {line}")).values, Facts(cuda_available=True))
        except ConfigurationError:
            continue  # no value could be read
        watched = {group.name: _unread(getattr(config, group.name)) for group in fields(Config)}
        config = Config(**{name: values for name, (values, _) in watched.items()})
        for rule in set(RULES) - of_every_value - set(RULES_OF_LAYOUTS):
            list(rule(config, Facts(cuda_available=True)))
            assert not chosen & {name for _, names in watched.values() for name in names}, (rule, line)


@pytest.mark.parametrize("kind", RECOMPUTATIONS)
def test_whether_a_kind_of_recomputation_is_legal_does_not_depend_on_the_layout(kind: str) -> None:
    """A search asks once for all layouts."""
    line = f"{BASE} {' '.join(flags(RECOMPUTATIONS[kind]))}"
    config = resolve(parse(shlex.split(line)).values, Facts(cuda_available=True))
    layout, read = _unread(config.layout)
    watched = replace(config, layout=layout)
    assert [found for rule in RULES_OF_RECOMPUTATION for found in rule(watched, Facts(cuda_available=True))] == []
    assert read <= {"sequence_parallel_keep_gathered"}, "which no search chooses"


EXPERTS = (
    f"--num-layers 8 --hidden-size 1024 --num-attention-heads 16 {_LLAMA} --num-experts 8 --moe-router-topk 2 "
    "--tensor-model-parallel-size 2"
)


def test_what_layouts_share_is_the_same_for_each_by_itself() -> None:
    """Layouts with the same tensor- and context-parallel sizes and micro batch hold the same of a layer, whatever their
    stages, experts' ranks and sharding."""
    question = asked(16, f"{EXPERTS} --global-batch-size 16", memory_gb=12.0)
    candidates = list(search_module._candidates(question))
    layouts_found = [each.config.layout for each in candidates]
    assert {1, 2, 4} <= {layout.expert_model_parallel_size for layout in layouts_found}
    assert {1, 2, 4} <= {layout.pipeline_model_parallel_size for layout in layouts_found}
    assert {1, 2, 4} <= {each.config.training.micro_batch_size for each in candidates}
    assert {"none", "full"} < {each.recomputation for each in candidates}
    for each in candidates:
        alone = Workload(each.config, Shapes(each.config), fused=True)
        assert stage_memory(alone, each.stage) == each.memory
        assert at_least(each.work, question.machine) == at_least(alone, question.machine)
        assert at_least(each.work.plain, question.machine) <= at_least(alone, question.machine)
        assert time_of(each.work, question.machine, bubble="formula") == time_of(
            alone, question.machine, bubble="formula"
        )


def test_what_a_search_sums_once_is_the_same_summed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages between the ends that hold the first one's layers are not asked, and what one sharding holds and computes
    is taken over for the next; each layout by itself, with all of its stages, has the same memory and time."""
    question = asked(16, f"{SMALL} --global-batch-size 32 --micro-batch-size 1")
    candidates = list(search_module._candidates(question))
    deep = [each for each in candidates if each.config.layout.pipeline_model_parallel_size > 2]
    assert {"ZeRO-1", "DDP"} <= {each.sharding for each in deep}
    assert {1, 2} < {each.config.layout.virtual_pipeline_model_parallel_size for each in deep}
    found = [(each.memory, each.stage, time_of(each.work, question.machine, bubble="formula")) for each in candidates]
    monkeypatch.setattr(Shapes, "heaviest", Shapes.representatives)
    for each, expected in zip(candidates, found, strict=True):
        work = Workload(each.config, Shapes(each.config), fused=True)
        memory = {stage: stage_memory(work, stage) for stage in range(len(work.shapes.counts))}
        assert max(memory.values(), key=lambda needed: needed.total) == expected[0] == memory[expected[1]]
        assert time_of(work, question.machine, bubble="formula") == expected[2]


def test_what_a_search_leaves_out_would_not_have_changed_it() -> None:
    """Every layout estimated, every kind of recomputation tried: the same fastest ways."""
    question = asked(32, f"{SMALL} --global-batch-size 64", memory_gb=60.0)
    candidates = list(search_module._candidates(question))
    for candidate in candidates:
        held = []
        for name, recomputation in RECOMPUTATIONS.items():
            config = search_module.resolved(question, {**candidate.choice, **_NOTHING_AGAIN, **recomputation})
            held.append((name, memory_of(config)))
        fit = [each for each in held if each[1] <= question.usable_bytes] or held[-1:]
        assert (candidate.recomputation, candidate.memory.total) == fit[0]
    fitting = [each for each in candidates if each.memory.total <= question.usable_bytes]
    assert {"none", "full"} < {each.recomputation for each in fitting}
    timed = [replace(each, time=time_of(each.work, question.machine, bubble="formula")) for each in fitting]
    assert all(at_least(each.work, question.machine) <= each.seconds for each in timed)
    assert all(formula_at_least(each.work, question.machine) <= each.seconds for each in timed)
    timed.sort(key=search_module._rank)
    ways = {search_module._way(each): each for each in reversed(timed)}
    expected = sorted(ways.values(), key=search_module._rank)[:6]
    found = search_module._fastest_ways(fitting, question, 6)
    assert [(each.choice, each.seconds) for each in found] == [(each.choice, each.seconds) for each in expected]
    simulated = sorted((search_module.timed(each, question.machine) for each in expected), key=search_module._rank)
    best, others = search_module._simulated(expected, question, 2)
    assert [(each.choice, each.time) for each in best] == [(each.choice, each.time) for each in simulated[:2]]
    exact = {id(each.work): each.seconds for each in simulated}
    assert len(others) == 4
    assert all(each.seconds <= exact[id(each.work)] for each in others)


@pytest.mark.parametrize("title", plans.QUESTIONS)
def test_nothing_that_the_tool_says_of_a_question_changes_unseen(title: str, tmp_path: Path) -> None:
    expected = section("plans.txt", title)
    assert plans.answer(title, tmp_path).rstrip() == expected, "python tests/golden/regenerate.py"


def test_what_keeps_anything_from_fitting_is_named_also_where_it_is_the_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = f"{SMALL} --global-batch-size 8 --context-parallel-size 1 --use-distributed-optimizer=false"
    assert main(["--world-size", "2", "--device-memory-gb", "1", "--", *line.split()]) == 1
    leave = "  leave to the planner: --context-parallel-size 1 --use-distributed-optimizer=false"
    assert leave in capsys.readouterr().out.splitlines()


def test_what_fills_the_memory_to_the_byte_does_not_end_the_larger_micro_batches() -> None:
    """They may fit with more recomputation, and are counted by themselves."""
    sizes = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --context-parallel-size 1"
    line = f"{SMALL} --global-batch-size 4 {sizes} --sequence-parallel"
    [smallest] = search(asked(8, f"{line} --micro-batch-size 1", 500.0), 2).best

    def fitting(flags: str) -> int:
        return search(replace(asked(8, f"{line} {flags}", 500.0), usable_bytes=smallest.memory.total), 1).fitting

    assert smallest.recomputation == "none"
    assert [fitting(f"--micro-batch-size {micro}") for micro in (1, 2, 4)] == [1, 1, 1]
    assert fitting("") == 3
