"""Scripts of MindSpeed-LLM are the runs that they are there, or refused for what has no equivalent."""

import re
import shlex

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.foreign.megatron_deepspeed import read
from megatron_ext.train.configure import configure
from tests.support.wrong_flags import BASE

_MODEL = "--num-layers 4 --num-experts 4 --moe-ffn-hidden-size 8 --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("script", "ours"),
    [
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --ai-framework mindspore", ""),
        ("--enable-hf2mg-convert --model-type-hf qwen3 --load model --exit-on-missing-checkpoint", "--load-hf model"),
        ("--num-layer-list 1,3", "--pipeline-model-parallel-layout Et*1|t*3L"),
        ("--n-shared-experts 3", "--moe-shared-expert-intermediate-size 24"),
        ("--first-k-dense-replace 1 --moe-layer-freq 1", "--moe-layer-freq [0,1,1,1]"),
        ("--first-k-dense-replace 1 --moe-layer-freq 2", "--moe-layer-freq [0,0,1,0]"),
        ("--first-k-dense-replace 0 --moe-layer-freq 1", "--moe-layer-freq 1"),
        ("--num-layer-list 1,3 --mtp-num-layers 1", "--mtp-num-layers 1 --pipeline-model-parallel-layout Et*1|t*3mL"),
        ("--fix-router", "--moe-router-force-load-balancing"),
        ("--use-glm-rope --rotary-percent 0.5", "--rotary-interleaved --rotary-percent 0.5"),
        ("--noop-layers 3", "--num-layers 3"),
        (
            "--noop-layers 0,3 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
            "--mtp-num-layers 1",
            "--num-layers 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t*1|t*1|mL "
            "--mtp-num-layers 1",
        ),
        (
            "--noop-layers 1 --pipeline-model-parallel-size 2 --first-k-dense-replace 2 --moe-layer-freq 1",
            "--num-layers 3 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*1|t*2L "
            "--moe-layer-freq [0,1,1]",
        ),
        ("--norm-topk-prob --moe-router-pre-softmax", ""),
        ("--moe-router-load-balancing-type softmax_topk --norm-topk-prob", "--moe-router-load-balancing-type none"),
        (
            "--moe-router-load-balancing-type softmax_topk",
            "--moe-router-load-balancing-type none --moe-router-pre-softmax",
        ),
        ("--moe-router-load-balancing-type none --seq-aux", "--moe-router-load-balancing-type seq_aux_loss"),
        (
            "--moe-tp-extend-ep --expert-model-parallel-size 2",
            "--expert-tensor-parallel-size 1 --expert-model-parallel-size 4",
        ),
        (
            "--multi-latent-attention --rope-scaling-type yarn --rope-scaling-factor 40 --rope-scaling-mscale 1.0 "
            "--rope-scaling-mscale-all-dim 1.0 --rope-scaling-original-max-position-embeddings 4096",
            "--multi-latent-attention --rope-type yarn --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 "
            "--original-max-position-embeddings 4096",
        ),
        (
            "--rope-scaling-type llama3 --rope-scaling-factor 8 --low-freq-factor 1 --high-freq-factor 4 "
            "--original-max-position-embeddings 8192",
            "--use-rope-scaling --rope-scaling-factor 8 --rope-scaling-low-freq-factor 1 "
            "--rope-scaling-high-freq-factor 4 --rope-scaling-original-max-position-embeddings 8192",
        ),
    ],
)
def test_flags_have_their_meaning(script: str, ours: str) -> None:
    found, expected = (read(shlex.split(f"{_MODEL} {line}")) for line in (script, ours))
    assert found.problems == expected.problems == ()
    assert found.values == expected.values


@pytest.mark.parametrize(
    "script",
    [
        "--num-layer-list 1,3 --pipeline-model-parallel-layout Ett|ttL",
        "--n-shared-experts 3 --moe-shared-expert-intermediate-size 5",
        "--enable-hf2mg-convert --load model --load-hf other",
    ],
)
def test_contradictions_are_refused(script: str) -> None:
    first, *_, flag, value = script.split()
    [problem] = read(shlex.split(f"{_MODEL} {script}")).problems
    assert problem.startswith(first)
    assert problem.endswith(f"but the script has {flag} {value}; leave one of them out")


def test_numbers_that_no_model_has_are_refused_at_once() -> None:
    assert "--num-layers: 1000000000 is above" in read(["--num-layers", "1000000000"]).problems[0]
    for script in (
        "--num-layers 1000000000 --first-k-dense-replace 1",
        "--first-k-dense-replace 1 --moe-layer-freq [1]*4",
    ):
        assert any("--first-k-dense-replace" in one for one in read(shlex.split(f"{_MODEL} {script}")).problems)
    for script in ("--num-layers 2 --pipeline-model-parallel-size 4", "--num-layers 1000000000"):
        assert any("--noop-layers" in one for one in read(shlex.split(f"{script} --noop-layers 1")).problems)
    listed = read(shlex.split("--num-layers 4 --num-layer-list 99999999999"))
    assert listed.values["pipeline_model_parallel_layout"] == "Et*99999999999L"  # which a rule refuses


@pytest.mark.parametrize(
    "script", ["--spec my_spec layer", "--fix-sub-seq-length 8", "--rope-scaling-type plm", "--noop-layers 4"]
)
def test_what_has_no_equivalent_is_refused_by_its_name(script: str) -> None:
    assert [problem.split()[0] for problem in read(shlex.split(f"{_MODEL} {script}")).problems] == [script.split()[0]]


_EXTENDED = "--num-experts 64 --moe-tp-extend-ep --tensor-model-parallel-size 8 --sequence-parallel"


@pytest.mark.parametrize(("experts", "ranks"), [(8, 32), (16, 128)])
def test_experts_over_too_many_ranks_are_named_as_typed_with_fixes_that_work(experts: int, ranks: int) -> None:
    launch = f"{BASE} --disable-bias-linear {_EXTENDED} --world-size {ranks}"
    line = f"{launch} --expert-model-parallel-size {experts}"
    with pytest.raises(ConfigurationError) as caught:
        configure(shlex.split(line))
    [problem] = caught.value.problems
    assert f"--expert-model-parallel-size {experts} x --tensor-model-parallel-size 8 (--moe-tp-extend-ep)" in problem
    given = "--expert-tensor-parallel-size 1 --expert-model-parallel-size"
    _, _, sizes = problem.partition(f"leave out --moe-tp-extend-ep, and use {given} ")
    assert sizes
    for size in re.findall(r"\d+", sizes):
        configure(shlex.split(f"{launch.replace(' --moe-tp-extend-ep', '')} {given} {size}"))


def test_a_number_of_ranks_that_is_none_is_a_problem() -> None:
    typed = read(shlex.split(f"{_MODEL} --moe-tp-extend-ep --expert-model-parallel-size many"))
    assert typed.problems == ("--expert-model-parallel-size: 'many' is not an integer",)
