"""Every flag of tools/plan.py and tools/draw_pipeline.py, changed alone, changes what they print."""

import gc
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner.commands import draw_pipeline, plan

SIZES = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
MODEL = f"{SIZES} --vocab-size 32000 --micro-batch-size 1 --global-batch-size 16"
LAYOUT = f"{MODEL} --bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
ONE = f"--evaluate --world-size 16 --json - {{}} -- {LAYOUT}"
"""One layout on two nodes, with pipeline stages in both."""
OF_FP32 = f"--evaluate --world-size 16 --json - {{}} -- {LAYOUT.replace('--bf16 ', '')}"
SEARCH = f"--world-size 4 --json - {{}} -- {MODEL} --bf16 --pipeline-model-parallel-size 1 --context-parallel-size 1"
ON_CPU = f"--evaluate --world-size 2 --device cpu --json - {{}} -- {MODEL}"
FROM_FILE = (
    "--evaluate --world-size 2 --json - --hf-config {} -- --seq-length 64 --micro-batch-size 1 --global-batch-size 4"
)
SHORT = f"--evaluate --world-size 2 --json - {{}} -- {MODEL} --bf16"
CALIBRATED = f"--evaluate --world-size 1 --json - --calibrate metrics.jsonl {{}} -- {MODEL} --bf16"

CHANGES = {
    "--world-size": (ONE, "", "--world-size 32"),
    "--evaluate": (SEARCH, "", "--evaluate"),
    "--device": (ONE, "", "--device a100"),
    "--device-memory-gb": (ONE, "", "--device-memory-gb 33"),
    "--memory-share": (ONE, "", "--memory-share 0.01"),
    "--gpus-per-node": (ONE, "", "--gpus-per-node 1"),
    "--efficiency": (ONE, "", "--efficiency 0.41"),
    "--link-efficiency": (ONE, "", "--link-efficiency 0.52"),
    "--peak-tflops": (ONE, "", "--peak-tflops 210"),
    "--peak-tflops in fp32": (OF_FP32, "", "--peak-tflops 10"),
    "--memory-bandwidth-gb-s": (ONE, "", "--memory-bandwidth-gb-s 1234"),
    "--intra-node-gb-s": (ONE, "", "--intra-node-gb-s 77"),
    "--inter-node-gb-s": (ONE, "", "--inter-node-gb-s 3"),
    "--hf-config": (FROM_FILE, "small", "large"),
    "--grad-reduce-in-bf16": (SHORT, "", "--grad-reduce-in-bf16"),
    "--calibrate": (CALIBRATED, "", "--calibrate slower.jsonl"),
    "--calibrate-flags": (CALIBRATED, "", f"--calibrate-flags '{MODEL.replace('8', '9', 1)} --bf16'"),
    "--processor-cores": (ON_CPU, "", "--processor-cores 1"),
    "--number": (SEARCH, "", "--number 1"),
    "--limits": (ONE, "", "--limits"),
    "--json": (ONE, "", "--json found.json"),
}
"""By flag: a command line, what stands in its place, and what else."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with what the lines name."""
    monkeypatch.chdir(tmp_path)
    for name, milliseconds in (("metrics.jsonl", 100.0), ("slower.jsonl", 300.0)):
        row = {"iteration": 1, "elapsed_ms": milliseconds, "global_batch_size": 16, "world_size": 1}
        Path(name).write_text((json.dumps(row) + "\n") * 8)
    llama: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 1000, "hidden_act": "silu",
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    for name, layers in (("small", 2), ("large", 4)):
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps({**llama, "num_hidden_layers": layers}))


def _said(main: Any, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    main(shlex.split(line))
    return capsys.readouterr().out


@pytest.mark.parametrize("flag", CHANGES)
def test_each_flag_changes_what_the_planner_prints(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, first, second = CHANGES[flag]
    assert _said(plan.main, line.format(first), capsys) != _said(plan.main, line.format(second), capsys)


def test_no_flag_is_left_out() -> None:
    shown = {
        action.option_strings[0]
        for action in plan._parser()._actions
        if action.option_strings and action.dest != "help" and action.help != "==SUPPRESS=="
    }
    assert shown == {flag.split()[0] for flag in CHANGES} | {"--svg", "--html"}


def test_svg_draws_into_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert _said(plan.main, SEARCH.replace("--json - ", "").format("--svg memory.svg"), capsys) != ""
    assert Path("memory.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("more", ["--json -", "--device-memory-gb 0.1"])
def test_svg_is_drawn_without_words_and_where_nothing_fits(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    _said(plan.main, SEARCH.replace("--json - ", "").format(f"--svg memory.svg {more}"), capsys)
    assert Path("memory.svg").read_text().startswith("<svg")


def test_svg_of_one_layout_is_refused() -> None:
    line = f"--evaluate --world-size 16 --svg memory.svg -- {LAYOUT}"
    with pytest.raises(ConfigurationError, match=r"^--svg .* leave out --evaluate, or use --html"):
        plan.main(shlex.split(line))


@pytest.mark.parametrize("way", ["", "--evaluate"])
def test_flags_are_named_as_they_were_typed(way: str) -> None:
    script = f"{MODEL} --num-experts 8 --moe-tp-extend-ep --tensor-model-parallel-size 4 --expert-model-parallel-size 3"
    with pytest.raises(ConfigurationError) as caught:
        plan.main(shlex.split(f"{way} --world-size 16 -- {script}"))
    assert "--expert-model-parallel-size 3 x --tensor-model-parallel-size 4 (--moe-tp-extend-ep)" in str(caught.value)


def test_html_shows_the_layouts_and_the_flags_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    words = _said(plan.main, SEARCH.replace("--json - ", "").format("--number 2 --html plan.html"), capsys)
    page = Path("plan.html").read_text()
    first = re.findall(r"^1  (.*?)  ", words, re.MULTILINE)[0]
    flags = words.splitlines()[-1].strip()
    assert f"<p>1: {first}</p>" in page
    assert f"<pre>{flags}</pre>" in page
    assert "2: activations" in page
    assert "3: activations" not in page


def test_html_of_one_layout_that_does_not_fit_shows_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--evaluate --world-size 16 --device-memory-gb 0.1 --html plan.html -- {LAYOUT}"
    assert "does not fit: stage 0 needs " in _said(plan.main, line, capsys)
    page = Path("plan.html").read_text()
    assert "does not fit: stage 0 needs " in page
    assert " GB may be filled</text>" in page


def test_json_goes_into_a_file_and_the_words_to_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    alone = _said(plan.main, ONE.format(""), capsys)
    assert _said(plan.main, ONE.format("--json found.json"), capsys) not in ("", alone)
    assert Path("found.json").read_text() == alone


def test_python_collects_its_garbage_by_itself_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    assert gc.isenabled()
    assert plan.main(["--evaluate", "--world-size", "16", "--", *LAYOUT.split()]) == 0
    assert gc.isenabled()


def test_the_ranks_may_be_named_among_the_training_flags(capsys: pytest.CaptureFixture[str]) -> None:
    line = ONE.format("").replace("--world-size 16 ", "")
    assert _said(plan.main, f"{line} --world-size 16", capsys) == _said(plan.main, ONE.format(""), capsys)


@pytest.mark.parametrize(("memory", "code"), [("80", 0), ("0.05", 1)])
@pytest.mark.parametrize("output", ["", "--json -", "--json found.json"])
def test_a_search_ends_with_whether_something_fits(
    memory: str, code: int, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = SEARCH.format(f"--device-memory-gb {memory}").replace("--json -", output)
    assert plan.main(shlex.split(line)) == code
    said = capsys.readouterr().out
    if output == "--json -":
        assert bool(json.loads(said)["best"]) == (code == 0)
    else:
        assert ("flags of 1, to add to yours:" in said) == (code == 0)


PICTURES = {
    "--stages": ("--stages 3 --width 90", "--stages 4"),
    "--chunks": ("--stages 2 --width 90", "--chunks 2"),
    "--group": ("--stages 2 --chunks 2 --microbatches 12 --width 90", "--group 4"),
    "--microbatches": ("--stages 3 --width 90", "--microbatches 11"),
    "--microbatches of a run": (f"--width 90 {{}} -- {LAYOUT}", "--microbatches 5"),
    "--width": ("--stages 3 --width 90", "--width 60"),
    "--world-size": (f"--width 90 --microbatches 4 --world-size 16 {{}} -- {LAYOUT}", "--world-size 32"),
    "--device": (f"--width 90 {{}} -- {LAYOUT}", "--device a100"),
    "--gpus-per-node": (f"--width 90 --world-size 16 {{}} -- {LAYOUT}", "--gpus-per-node 1"),
}


@pytest.mark.parametrize("flag", PICTURES)
def test_each_flag_changes_what_is_drawn(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, change = PICTURES[flag]
    line = line if "{}" in line else f"{line} {{}}"
    changed = _said(draw_pipeline.main, line.format(change), capsys)
    assert changed != _said(draw_pipeline.main, line.format(""), capsys)


def test_a_page_shows_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    _said(draw_pipeline.main, "--stages 3 --width 90 --html page.html", capsys)
    assert "<svg" in Path("page.html").read_text()


def test_by_default_a_picture_is_of_one_replica(capsys: pytest.CaptureFixture[str]) -> None:
    """Of as many ranks as the product of the axes that divide the model."""
    line = f"--width 90 --microbatches 4 {{}} -- {LAYOUT} --context-parallel-size 2 --position-embedding-type rope"
    assert _said(draw_pipeline.main, line.format(""), capsys) == _said(
        draw_pipeline.main, line.format("--world-size 8"), capsys
    )


@pytest.mark.parametrize("flag", ["--stages", "--chunks", "--microbatches", "--group"])
def test_numbers_below_1_are_refused(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=r"are numbers from 1$"):
        draw_pipeline.main([*(["--stages", "3"] if flag != "--stages" else []), flag, "0"])


def test_flags_of_deepspeed_are_understood_and_all_problems_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(f"--evaluate --world-size 16 --json - -- {MODEL} --bf16 --deepspeed --zero-stage")
    numbers = []
    for stage, flags in (("1", "--use-distributed-optimizer"), ("3", "--use-torch-fsdp2")):
        for own in ([*words, stage], [*words[:-2], *flags.split()]):
            plan.main(own)
            numbers.append(json.loads(capsys.readouterr().out))
    assert numbers[0] == numbers[1]
    assert numbers[2] == numbers[3] != numbers[0]
    wrong = "--bogus 3 --ffn-hidden-size x --num-attention-heads 15 --ddp-bucket-size 1"
    with pytest.raises(ConfigurationError) as caught:
        plan.main([*words, "3", *shlex.split(wrong)])
    said = "\n".join(caught.value.problems)
    for text in ("unknown flag --bogus", "--ffn-hidden-size", "--num-attention-heads 15", "--zero-stage 3 gathers"):
        assert text in said, said
