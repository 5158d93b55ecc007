"""Functions that only hand on what they are given: every value is another one, and arrives at the right parameter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.fsdp import ShardingStrategy

import megatron_ext.verify.record as recording  # which starts no rank here
from megatron_ext import device
from megatron_ext.cli import inspect_dataset
from megatron_ext.cli import pretrain as program
from megatron_ext.config.derived import lr_scale
from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.schema.data import TOKENIZER_TYPES, DataConfig
from megatron_ext.device.external_kernels import asked_for
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.foreign.fsdp import TABLE
from megatron_ext.foreign.key_meanings import FULL_SHARD, SHARD_GRAD, Cases, Default, NoCounterpart
from megatron_ext.plan import dry_run
from megatron_ext.plan import verdict as plan_verdict
from megatron_ext.resilience import elastic, launch
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.tokenizer import build, gpt2, huggingface, sentencepiece, tiktoken
from megatron_ext.train import configure as train_configure
from megatron_ext.train import extensions, pretrain
from megatron_ext.train.configure import Configured
from megatron_ext.train.extensions import NONE
from megatron_ext.verify import parity, proof
from tests.support.requests import Requests
from tests.support.small_models import small_config


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """What the stand-ins of a test note."""
    return Requests(monkeypatch)


def test_flags_of_a_tokenizer(requests: Requests) -> None:
    requests.take(build, "build_tokenizer", "tokenizer")
    flags = DataConfig(
        tokenizer_type="TikTokenizer",
        tokenizer_model="model",
        vocab_size=31,
        vocab_file="vocabulary",
        merge_file="merges",
        tokenizer_special_tokens=("<a>", "<b>"),
        tiktoken_pattern="v1",
        tiktoken_num_special_tokens=17,
    )
    assert build.tokenizer_from_flags(flags) == "tokenizer"
    assert requests.of("build_tokenizer") == {
        "type": "TikTokenizer",
        "model": "model",
        "vocab_size": 31,
        "vocab_file": "vocabulary",
        "merge_file": "merges",
        "special_tokens": ("<a>", "<b>"),
        "tiktoken_pattern": "v1",
        "tiktoken_num_special_tokens": 17,
    }


def test_what_each_tokenizer_is_built_from(requests: Requests, tmp_path: Path) -> None:
    made = {
        "SentencePieceTokenizer": sentencepiece,
        "HuggingFaceTokenizer": huggingface,
        "TikTokenizer": tiktoken,
        "GPT2BPETokenizer": gpt2,
    }
    for name, module in made.items():
        requests.take(module, name, name)
    file = tmp_path / "file"
    file.touch()
    named: dict[str, Any] = {"special_tokens": ("<a>",)}
    built = [
        build.build_tokenizer("SentencePieceTokenizer", str(file)),
        build.build_tokenizer("HuggingFaceTokenizer", str(tmp_path), 31, **named),
        build.build_tokenizer("HuggingFaceTokenizer", str(tmp_path)),
        build.build_tokenizer("GPT2BPETokenizer", vocab_file="v", merge_file="m", **named),
        build.build_tokenizer(
            "TikTokenizer", str(file), 31, tiktoken_pattern="v1", tiktoken_num_special_tokens=17, **named
        ),
        build.build_tokenizer("TikTokenizer", str(file)),
    ]
    assert built == [name for name, _ in requests.made]
    assert [list(given.values()) for _, given in requests.made] == [
        [str(file)],
        [str(tmp_path), ("<a>",)],
        [str(tmp_path), ()],
        ["v", "m", ("<a>",)],
        [str(file), 31, "v1", 17, ("<a>",)],
        [str(file), tiktoken.DEFAULT_VOCAB_SIZE, "v2", 1000, tiktoken.DEFAULT_SPECIAL_TOKENS],
    ]


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
def test_a_flag_that_a_tokenizer_does_not_read_is_refused(type: str) -> None:
    readers = {
        "vocab_file": {"GPT2BPETokenizer"},
        "merge_file": {"GPT2BPETokenizer"},
        "special_tokens": {"HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer"},
        "tiktoken_pattern": {"TikTokenizer"},
    }
    for name, reading in readers.items():
        given: Any = {name: ("a", "b") if name == "special_tokens" else "v1"}
        if type in reading:
            with pytest.raises(ConfigurationError, match="needs --"):  # the flag is taken, another one is missing
                build.build_tokenizer(type, **given)
        else:
            flag = "--tokenizer-special-tokens a b" if name == "special_tokens" else f"--{name.replace('_', '-')} v1"
            with pytest.raises(ConfigurationError, match=f"^{flag} is not read by --tokenizer-type {type}, only by "):
                build.build_tokenizer(type, **given)


class _EnoughError(Exception):
    """Raised where a test has seen enough."""


@pytest.mark.parametrize("plain", [True, False])
def test_runs_and_proofs_install_the_device_alike(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout is proved with the kernels that a run has."""
    asked: list[Any] = []

    def install(*given: Any, **named: Any) -> None:
        asked.append((*given, named))
        raise _EnoughError

    model = {} if plain else {"transformer_impl": "transformer_engine"}
    training = {"disable_jit_fuser": plain, "no_triton_kernels": not plain}
    config = small_config(model=model, layout={"device": "auto"}, training=training)
    configured: Any = Configured(config, Typed({}), Typed({}))
    monkeypatch.setattr(device, "install", install)
    monkeypatch.setattr(train_configure, "configure", lambda flags: configured)
    with pytest.raises(_EnoughError):
        pretrain._pretrain(configured, RunStatus(rank=0), NONE)
    with pytest.raises(_EnoughError):
        recording._trained([], 1, None, False, NONE)
    kernels = () if plain else ("transformer_engine",)
    assert asked_for(config) == kernels
    assert asked == [("auto", {"fuses": not plain, "own_kernels": plain, "kernels": kernels})] * 2


def test_records_of_a_case(requests: Requests) -> None:
    requests.take(parity, "record", "run")
    data = ["--data-path", "corpus"]
    experiment = parity.Experiment(data, 7)
    name, case = next((name, case) for name, case in parity_cases().items() if case.flags and case.world_size > 1)
    model = [*parity.RECIPE.split(), *parity.MODELS[case.model].split(), *data]
    fault = len
    assert experiment.train(case, bf16=True, sabotage=fault) == "run", name  # pyright: ignore[reportArgumentType]
    assert experiment.train(case) == "run"
    assert experiment.reference(case.model) == experiment.reference(case.model) == "run"
    assert experiment.reference(case.model, bf16=True) == "run"
    layout = {"flags": [*model, "--bf16", *case.flags], "world_size": case.world_size, "steps": 7, "sabotage": fault}
    assert requests.all_of("record") == [
        layout,
        {**layout, "flags": [*model, *case.flags], "sabotage": None},
        {"flags": model, "world_size": 1, "steps": 7},
        {"flags": [*model, "--bf16"], "world_size": 1, "steps": 7},
    ], "the reference is trained once"


def parity_cases() -> dict[str, Any]:
    """Return the cases that layouts are compared in."""
    from megatron_ext.verify.cases import CASES

    return CASES


def test_both_runs_of_a_proof(requests: Requests) -> None:
    both = proof.Comparison(["--one"], ["--other"], 6, ())
    requests.take(proof, "comparison", both)
    requests.take(proof, "record", "run")
    found = proof.prove(["--flags"], 5, steps=7, tolerance=0.25, device="cuda", sabotage=len)  # pyright: ignore[reportArgumentType]
    same = {"steps": 7, "outputs": True, "device": "cuda"}
    assert requests.of("comparison") == {"argv": ["--flags"], "world_size": 5}
    assert requests.all_of("record") == [
        {"flags": ["--one"], "world_size": 1, **same},
        {"flags": ["--other"], "world_size": 6, "sabotage": len, **same},
    ]
    assert found == proof.Proof("run", "run", 0.25)  # pyright: ignore[reportArgumentType]


def test_what_ranks_train_for_a_record(requests: Requests) -> None:
    requests.take(recording, "run_ranks", [])
    for kind in ("cpu", "cuda"):
        with pytest.raises(IndexError):  # no rank, no record
            recording.record(["--flags"], 6, 7, len, outputs=True, device=kind)  # pyright: ignore[reportArgumentType]
    rows = [given for _, given in requests.made]
    assert [list(each.values())[:2] for each in rows] == [[6, recording._train]] * 2
    for each, kind in zip(rows, ("cpu", "cuda"), strict=True):
        handed = next(value for value in each.values() if isinstance(value, tuple))
        assert handed == (["--flags", "--device", kind], 7, len, True, NONE)
        assert each["fresh"] == (kind == "cuda")


@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda strategy: strategy.name)
def test_a_sharding_strategy_is_the_same_by_name_and_by_number(strategy: Any) -> None:
    """Torch numbers them; the newer reshard_after_forward takes the names as well."""
    expected = {"FULL_SHARD": FULL_SHARD, "SHARD_GRAD_OP": SHARD_GRAD}.get(strategy.name)
    number = list(ShardingStrategy).index(strategy) + 1
    for prefix in ("", "fsdp_"):
        meanings = TABLE[f"fsdp_config.{prefix}sharding_strategy"]
        assert isinstance(meanings, Cases)
        found = meanings.by_value[strategy.name.lower().lstrip("_")]
        assert found == meanings.by_value[str(number)]
        if expected is None:
            assert isinstance(found, Default if strategy.name == "NO_SHARD" else NoCounterpart)
        else:
            assert found == expected
        reshard = TABLE[f"fsdp_config.{prefix}reshard_after_forward"]
        assert isinstance(reshard, Cases)
        assert reshard.by_value.get(strategy.name.lower(), found) == found


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("scaled", [None, "scaled"])
def test_a_dry_run(
    fits: bool, code: int, scaled: str | None, requests: Requests, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = Typed({}, dry_run=True, device_memory_gb=33.0, device_name="h200")
    config = small_config()
    requests.take(plan_verdict, "verdict", (["memory", "of it"], fits))
    requests.take(dry_run, "describe", "described")
    assert program._describe(Configured(config, typed, typed), scaled, {}) == code
    assert requests.made == [
        ("verdict", {"config": config, "device_memory_gb": 33.0, "device_name": "h200"}),
        ("describe", {"config": config}),
    ]
    shown = f"{scaled}\n\n" if scaled else ""
    assert capsys.readouterr().out == f"described\n\n{shown}memory\nof it\n"


def test_a_dry_run_is_of_the_users_own_parts(requests: Requests) -> None:
    """An own optimizer takes the place of the flags'."""
    typed = Typed({}, dry_run=True)
    config, applied = small_config(), small_config({"hidden_size": 48})
    assert applied != config
    requests.take(extensions.Extensions, "applied", applied)
    requests.take(plan_verdict, "verdict", (["memory"], True))
    requests.take(dry_run, "describe", "described")
    assert program._describe(Configured(config, typed, typed), None, {"loss": lambda *_: None}) == 0
    assert requests.of("applied")["config"] is config
    assert requests.of("verdict")["config"] is applied
    assert requests.of("describe")["config"] is applied


@pytest.mark.parametrize("rank", [0, 1])
def test_the_way_of_a_run(
    rank: int, requests: Requests, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only rank 0 warns; all describe or train, unless an earlier attempt has stopped."""
    config = small_config()
    status = RunStatus(rank=rank)
    requests.take(lr_scale, "scaling_text", "scaled")
    requests.take(program, "_describe", 7)
    requests.take(pretrain, "pretrain")
    monkeypatch.setattr(program, "_is_needed", lambda argv: "--spare" not in argv)
    asked: list[Any] = []
    typed = Typed({"lr": 3.0}, warnings=("careful",))

    def configure(argv: Any, **named: Any) -> Configured:
        asked.append((argv, named))
        return Configured(config, typed, typed)

    monkeypatch.setattr(train_configure, "configure", configure)
    for stopped, names in ((False, ["pretrain"]), (True, [])):
        monkeypatch.setattr(launch, "stopped_before", lambda stopped=stopped: stopped)
        requests.made.clear()
        assert program.main(["--flags"], status, loss="loss") == 0
        assert [name for name, _ in requests.made] == [*(["scaling_text"] if rank == 0 else []), *names]
    assert asked == [(["--flags"], {"believing": True})] * 2
    output = capsys.readouterr()
    assert output == (("scaled\n", "warning: careful\n" * 2) if rank == 0 else ("", ""))
    typed = Typed({}, dry_run=True)
    requests.made.clear()
    assert program.main(["--flags"], status, loss="loss") == 7
    given = requests.of("_describe")
    assert (given["scaled"], given["own"]) == ("scaled" if rank == 0 else None, {"loss": "loss"})
    requests.made.clear()
    assert program.main(["--spare"], status) == 0
    assert requests.made == []


@pytest.mark.parametrize(
    ("used", "takes_part", "needed", "calls"),
    [
        (None, True, True, []),
        (6, True, True, ["take_part"]),
        (6, False, False, ["take_part", "wait_as_spare"]),
        (0, True, True, ["wait_for_more", "take_part"]),
    ],
)
def test_a_rank_of_an_elastic_launch(
    used: int | None,
    takes_part: bool,
    needed: bool,
    calls: list[str],
    requests: Requests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "11")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(launch, "stopped_before", lambda: False)
    monkeypatch.setattr(program, "read", lambda argv: Typed({"elastic": True, "lr": 3.0}))
    requests.take(program, "_works", "works")
    requests.take(elastic, "ranks_to_use", used)
    requests.take(elastic, "take_part", takes_part)
    requests.take(elastic, "wait_as_spare")
    requests.take(elastic, "wait_for_more")
    assert program._is_needed(["--flags"]) == needed
    given = requests.of("ranks_to_use")
    assert (given["launched"], given["values"]) == (11, {"elastic": True, "lr": 3.0})
    assert given["works"](5) == "works"
    assert requests.of("_works") == {"argv": ["--flags"], "ranks": 5}
    waited = {
        "take_part": {"ranks": used},
        "wait_as_spare": {"launched": 11, "used": used},
        "wait_for_more": {"launched": 11},
    }
    assert requests.made[1:-1] == [(name, waited[name]) for name in calls]
    for stopped, values in ((True, {"elastic": True}), (False, {})):
        requests.made.clear()
        monkeypatch.setattr(launch, "stopped_before", lambda stopped=stopped: stopped)
        monkeypatch.setattr(program, "read", lambda argv, values=values: Typed(values))
        assert program._is_needed([]) != stopped
        assert requests.made == []


def test_whether_a_number_of_ranks_works(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def configure(argv: Any, world_size: int) -> None:
        asked.append((argv, world_size))
        if world_size == 5:
            raise ConfigurationError("not with 5")

    monkeypatch.setattr(train_configure, "configure", configure)
    assert [program._works(["--flags"], ranks) for ranks in (5, 6)] == [False, True]
    assert asked == [(["--flags"], 5), (["--flags"], 6)]


@pytest.mark.parametrize(("vocab_size", "blocks"), [(None, []), (0, ["block"]), (31, ["block"])])
def test_a_pair_is_verified_as_far_as_it_can_be(
    vocab_size: int | None, blocks: list[str], requests: Requests, capsys: pytest.CaptureFixture[str]
) -> None:
    requests.take(inspect_dataset, "check_indexed_files")
    requests.take(inspect_dataset, "known_blocks", blocks)
    requests.take(inspect_dataset, "first_damage")
    requests.take(inspect_dataset, "check_token_ids")
    requests.take(inspect_dataset, "exists", True)
    requests.take(inspect_dataset, "token_count", 70)
    requests.take(inspect_dataset, "Mask", SimpleNamespace(check=lambda: 50))
    inspect_dataset.verify("data", vocab_size)
    below = "" if vocab_size is None else f", every token is below {vocab_size}"
    sums = ", as the checksums of its manifest say" if blocks else ""
    masked = ", its mask names 50 of 70 tokens to train on"
    assert capsys.readouterr().out == f"data: whole{below}{sums}{masked}\n"
    checked = [given for name, given in requests.made if name == "check_token_ids"]
    assert [list(given.values()) for given in checked] == ([] if vocab_size is None else [["data", vocab_size]])
    requests.take(inspect_dataset, "first_damage", "data.bin is damaged")
    with pytest.raises(DataError, match=r"^data\.bin is damaged\. Copy the file again"):
        inspect_dataset.verify("data", vocab_size)
