"""Scripts of MindSpeed-LLM, of pretrain_mamba.py and of BigScience are the runs that they are there, or refused."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate.megatron_deepspeed import read
from megatron_ext.train.configure import configure
from tests.support.small_runs import MODEL
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


HYBRID = "--normalization RMSNorm --disable-bias-linear --mamba-head-dim 8 --mamba-num-groups 2 --is-hybrid-model"


@pytest.mark.parametrize(
    "module", ["mamba.mamba_layer_specs mamba_stack_spec", "hybrid.hybrid_layer_specs hybrid_stack_spec"]
)
@pytest.mark.parametrize("flag", ["--hybrid-override-pattern", "--hybrid-layer-pattern"])
def test_a_pattern_is_what_counts(flag: str, module: str) -> None:
    script = (
        f"{HYBRID} {flag} M- --hybrid-attention-ratio 0.5 --spec megatron.core.models.{module} --hybrid-mlp-ratio 0.5"
    )
    configured = configure([*MODEL, *shlex.split(script)])
    assert configured.config.model.hybrid_layer_pattern == "M-"
    for taken in ("--spec", "--hybrid-attention-ratio", "--hybrid-mlp-ratio"):
        text = f"{taken} changes nothing here: --hybrid-layer-pattern says what each layer is"
        assert configured.typed.warnings.count(text) == 1


def test_without_a_pattern_the_flag_to_use_is_named() -> None:
    """Without it the layers would have attention."""
    script = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hybrid-attention-ratio 0.5"
    with pytest.raises(ConfigurationError) as found:
        configure([*MODEL, *shlex.split(script)])
    assert len(found.value.problems) == 2
    assert all("--hybrid-layer-pattern" in problem for problem in found.value.problems)


def test_a_spec_of_ones_own_stays_refused() -> None:
    script = f"{HYBRID} --hybrid-layer-pattern M- --spec my.specs mamba_stack_spec"
    with pytest.raises(ConfigurationError, match="layer specs are not loaded"):
        configure([*MODEL, *shlex.split(script)])


def test_whole_prefixes_are_the_data_of_their_part(tmp_path: Path) -> None:
    file = tmp_path / "valid.txt"
    file.write_text('"valid: 1.0 0:1 v"\n')
    train = ["--train-weighted-split-paths", "train: 0.3 0:1 a, 0.7 0.0:1.0 b"]
    typed = read([*train, "--valid_weighted_split_paths_path", str(file)])
    assert typed.values == {"train_data_path": ("0.3", "a", "0.7", "b"), "valid_data_path": ("1.0", "v")}
    assert not typed.problems


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train: 1 0:0.9 a"], "a has 0:0.9, not the whole, 0:1; use --data-path with --split"),
        (["train: 1 0:1 a", "other: 1 0:1 b"], "2 words, but expected one"),
        (["1 0:1 a"], 'expected one, "NAME: WEIGHT BEGIN:END PREFIX, ..."'),
        (["train: 1 a"], 'expected one, "NAME: WEIGHT BEGIN:END PREFIX, ..."'),
        ([], "0 words, but expected one"),
    ],
)
def test_other_words_are_refused_with_the_reason(words: list[str], said: str) -> None:
    [problem] = read(["--train-weighted-split-paths", *words]).problems
    assert problem.startswith("--train-weighted-split-paths: ")
    assert said in problem


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "open.txt").write_text('"train: 1 0:1 a')
    for name, said in (("none.txt", "No such file"), ("open.txt", "No closing quotation"), ("", "no regular file")):
        [problem] = read(["--test-weighted-split-paths-path", str(tmp_path / name)]).problems
        assert problem.startswith(f"--test-weighted-split-paths-path {tmp_path / name}: ")
        assert said in problem


def test_a_dry_run_does_without_the_file() -> None:
    words = ["--train-weighted-split-paths-path", "/nowhere/train.txt"]
    typed = read([*words, "--dry-run"])
    assert not typed.problems
    assert "/nowhere/train.txt does not exist; a run needs it" in typed.warnings[0]
    assert "No such file" in read(words).problems[0]
