"""One layout evaluated as it is given; a measured run that corrects the estimates; what a pipe that closes does."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.cost.hardware import TABLE, Machine, hardware
from megatron_ext.cost.traffic import Term, sent
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.catalogue import count_per_rank
from megatron_ext.plugins.planner.calibrate import believed
from megatron_ext.plugins.planner.commands.plan import main
from megatron_ext.plugins.planner.interconnect import latency, transfer
from megatron_ext.plugins.planner.search_input import placeholders

ROOT = Path(__file__).parents[3]
SEVEN_BILLION = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 "
    "--vocab-size 32000 --global-batch-size 512 --micro-batch-size 1 --swiglu --normalization RMSNorm --bf16 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --hidden-dropout 0 "
    "--attention-dropout 0"
)


def evaluated(
    capsys: pytest.CaptureFixture[str], *more: str, own: tuple[str, ...] = ("--world-size", "8")
) -> dict[str, Any]:
    assert main(["--evaluate", "--device", "h100", "--json", "-", *own, "--", *SEVEN_BILLION.split(), *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_numbers_are_those_of_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(capsys, "--use-distributed-optimizer", "--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert found["fits"] is True
    assert found["step_seconds_low"] < found["step_seconds"] < found["step_seconds_high"]
    assert found["tokens_per_second"] == pytest.approx(512 * 4096 / found["step_seconds"])
    assert found["tokens_per_second_per_gpu"] == pytest.approx(found["tokens_per_second"] / 8)
    assert found["mfu"] == pytest.approx(found["tflops_per_gpu"] / TABLE["h100"].peak_16bit_tflops)
    # Attention is 6 l h s of a token's operations (causal), and as much again with all keys.
    more = found["tflops_per_gpu_full_attention"] - found["tflops_per_gpu"]
    assert more == pytest.approx(found["tokens_per_second"] / 8 * 6 * 32 * 4096 * 4096 / 1e12)
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"])
    assert found["memory_bytes"] == max(stage["total"] for stage in found["memory_by_stage"])
    assert found["hidden_seconds"]["tp"] > 0 < found["exposed_seconds"]["tp"]


def test_nothing_is_chosen_and_what_does_not_fit_has_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    """DDP without recomputation needs 18 bytes a parameter, and gets no other flags than those given."""
    found = evaluated(capsys)
    assert found["fits"] is False
    assert found["memory_bytes"] > 18 * 6.7e9 > found["usable_bytes"]
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    recomputed = evaluated(capsys, *full.split())
    assert found["step_seconds"] < recomputed["step_seconds"] < 1.5 * found["step_seconds"]
    assert recomputed["memory_bytes"] < found["memory_bytes"]
    assert main(["--evaluate", "--world-size", "8", "--", *SEVEN_BILLION.split()]) == 0
    assert "does not fit: stage 0 needs" in capsys.readouterr().out


@pytest.mark.parametrize("said", [["--recompute-granularity", "none"], ["--recompute-granularity=none"]])
def test_no_recomputation_can_be_said(said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluated, it is what the flag's absence is; a search that would choose some has to do without."""
    assert evaluated(capsys, *said) == evaluated(capsys)
    found = []
    for more in ([], said):
        own = ["--world-size", "8", "--device-memory-gb", "30", "--", *SEVEN_BILLION.split(), "--use-torch-fsdp2"]
        assert main([*own, *more]) == 0
        found.append(capsys.readouterr().out.split("why 1")[0])
    assert "recompute" in found[0]
    assert "recompute" not in found[1]


def test_what_limits_the_layout_given(capsys: pytest.CaptureFixture[str]) -> None:
    """More memory is of no use to a layout that is given."""
    found = evaluated(capsys, own=("--world-size", "8", "--limits"))
    assert found["limits"][0]["part"] == "matrix products"
    assert "memory size" not in {each["part"] for each in found["limits"]}


def test_an_illegal_layout_has_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    own = ["--evaluate", "--world-size", "8", "--json", str(file)]
    with pytest.raises(ConfigurationError, match="--tensor-model-parallel-size 3"):
        main([*own, "--", *SEVEN_BILLION.split(), "--tensor-model-parallel-size", "3"])
    found = json.loads(file.read_text())
    assert found["legal"] is False
    assert found["step_seconds"] is None
    assert any("--tensor-model-parallel-size 3" in problem for problem in found["problems"])


def test_gradients_of_2_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    four, two = evaluated(capsys), evaluated(capsys, "--grad-reduce-in-bf16")
    assert four["memory_bytes"] - two["memory_bytes"] == pytest.approx(2 * 6_738_415_616)
    assert two["sent_bytes"] == pytest.approx(four["sent_bytes"] / 2)


@pytest.mark.parametrize(
    ("strategy", "reduced", "gathered"), [("optim", 1, 1), ("optim_grads", 4, 1), ("optim_grads_params", 4, 8)]
)
def test_what_is_divided_is_exchanged_for_each_microbatch(strategy: str, reduced: int, gathered: int) -> None:
    """Shards of gradients are all that a rank has room for; whole weights are gathered for each of two passes."""
    line = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 1000 --train-iters 9 "
        "--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --mock-data --device cpu --use-megatron-fsdp "
        f"--use-distributed-optimizer --data-parallel-sharding-strategy {strategy}"
    )
    config = resolve(parse(line.split()).values, Facts(world_size=2))
    size, terms = sum(count_per_rank(config)), sent(config, 0)
    assert [(term.collective, term.bytes) for term in terms if term.axis == "dp"] == [
        ("reduce-scatter", reduced * size * 4 / 2),
        ("all-gather", gathered * size * 4 / 2),
    ]


def test_a_ring_of_sends_has_one_adapter_at_the_border() -> None:
    """Eight ranks of context parallelism in two nodes of 4: the rank at the border sends alone; a collective uses all
    adapters of the node."""
    values = parse(f"{SEVEN_BILLION} --context-parallel-size 8".split()).values
    layout = resolve({**values, **placeholders(values), "world_size": 8}, Facts(cuda_available=True)).layout
    machine = Machine(hardware("h100"), gpus_per_node=4, link_efficiency=1.0)
    ring, gathered, exchanged = (Term("cp", kind, 1e9, "") for kind in ("send", "all-gather", "all-to-all"))
    assert transfer(exchanged, layout, machine) == pytest.approx(4 / 7 / 50)  # to 4 of 7 others, in the other node
    assert transfer(ring, layout, machine) == pytest.approx(1 / 50)
    assert transfer(gathered, layout, machine) == pytest.approx(1 / (4 * 50))
    assert latency(gathered, layout, machine) > latency(ring, layout, machine) > 0


def test_a_measured_run_corrects_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = evaluated(capsys)
    metrics = tmp_path / "metrics.jsonl"
    slow = [{"iteration": 1, "elapsed_ms": 1e9, "global_batch_size": 512, "world_size": 8}]
    rest = [
        {"iteration": n, "elapsed_ms": 1500 * before["step_seconds"], "global_batch_size": 512} for n in range(2, 20)
    ]
    rows = [*slow, *rest, {"iteration": 19, "validation_loss": 3.0}]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ("--world-size", "8", "--calibrate", str(metrics), "--calibrate-flags", f"{SEVEN_BILLION} --world-size 8")
    after = evaluated(capsys, own=own)
    assert after["measured_ratio"] == pytest.approx(1.5)
    assert after["correction"] == pytest.approx(believed(1.5))
    assert 1.49 < after["correction"] < 1.5
    assert after["step_seconds"] == pytest.approx(after["correction"] * before["step_seconds"])
    other = evaluated(capsys, "--tensor-model-parallel-size", "4", own=own)
    plain = evaluated(capsys, "--tensor-model-parallel-size", "4")
    assert other["step_seconds"] == pytest.approx(after["correction"] * plain["step_seconds"])
    words = f"{SEVEN_BILLION} --use-distributed-optimizer --optimizer-cpu-offload"
    assert main(["--evaluate", *own, "--", *words.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("because the run of --calibrate took 1.500 times its estimate)")
    # 12 bytes of each of 6.74e9 parameters, over 8 ranks of one node.
    assert lines[-1] == "10.1 GB a device in host memory, up to 80.9 GB a node"
    metrics.write_text('{"iteration": 1, "validation_loss": 1.0}\n')
    with pytest.raises(ConfigurationError, match="no row with elapsed_ms"):
        evaluated(capsys, own=own)
