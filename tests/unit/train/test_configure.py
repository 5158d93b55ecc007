"""How a command line becomes a checked configuration: what is told of files, checkpoints and restarts, one by one."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint.native.resume import Resume, Search
from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.train import assumed_facts as believing
from megatron_ext.train import configure as module
from megatron_ext.train.assumed_facts import assumed_facts
from megatron_ext.train.configure import Configured
from tests.support.small_models import small_config

NOTHING: Any = None
GIVEN = Typed({"load": "ckpt"}, problems=("a wrong word",))


@pytest.mark.parametrize(
    ("problems", "raised", "told"),
    [
        ((), None, None),
        (("one",), None, ["one"]),
        ((), ConfigurationError(["two", "three"]), ["two", "three"]),
        (("one",), ConfigurationError(["two", "three"]), ["one", "two", "three"]),
        (("one",), DataError("bad file"), ["one"]),
        ((), DataError("bad file"), DataError),
    ],
)
def test_all_problems_are_told_at_once(
    problems: tuple[str, ...], raised: Exception | None, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of words first; a file that is wrong is told when the words are right."""

    def made(*_: Any, **__: Any) -> Any:
        if raised is not None:
            raise raised
        return "configured"

    monkeypatch.setattr(module, "read", lambda argv: Typed({}, problems=problems))
    monkeypatch.setattr(module, "look", lambda values: None)
    monkeypatch.setattr(module, "_configured", made)
    if told is None:
        assert module.configure(["--flags"]) == "configured"
    elif told is DataError:
        with pytest.raises(DataError, match=r"^bad file$"):
            module.configure(["--flags"])
    else:
        with pytest.raises(ConfigurationError) as error:
            module.configure(["--flags"])
        assert list(error.value.problems) == told


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("search", [None, Search("ckpt"), Search("ckpt", resume=Resume(Path("a"), 1, None))])
def test_only_a_dry_run_believes(
    search: Search | None, asked: bool, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    given = Typed({}, dry_run=dry_run)
    monkeypatch.setattr(module, "read", lambda argv: given)
    monkeypatch.setattr(module, "look", lambda values: search)
    monkeypatch.setattr(module, "_configured", lambda *given, **named: heard.append((given, named)))
    module.configure(["--flags"], believing=asked, world_size=6)
    resume = None if search is None else search.resume
    assert heard == [((given, search, resume), {"believing": asked and dry_run, "world_size": 6})]


@pytest.mark.parametrize(
    ("before", "found", "again"),
    [
        (None, None, False),
        (None, Resume(Path("a"), 1, None, {"lr": 1.0}), True),
        (Resume(Path("a"), 1, None, {"lr": 1.0}), None, True),
        (Resume(Path("a"), 1, None, {"lr": 1.0}), Resume(Path("a"), 1, None, {"lr": 1.0}, damaged=("b",)), False),
        (Resume(Path("a"), 1, None, {"lr": 1.0}), Resume(Path("b"), 1, None, {"lr": 1.0}), True),
        (Resume(Path("a"), 1, None, {"lr": 1.0}), Resume(Path("a"), 1, None, {"lr": 2.0}), True),
    ],
)
def test_another_checkpoint_means_other_flags(
    before: Resume | None, found: Resume | None, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found is what will be loaded, in any case."""
    heard: list[Any] = []
    monkeypatch.setattr(module, "_configured", lambda *given: heard.append(given) or "again")
    search = Search("ckpt")
    configured = Configured(small_config(), GIVEN, GIVEN, search, before)
    result: Any = module.configure_for(configured, found)
    if again:
        assert (result, heard) == ("again", [(GIVEN, search, found)])
    else:
        assert (result, heard) == (dataclasses.replace(configured, resume=found), [])
        assert result.resume is found


def _config(**groups: dict[str, Any]) -> Config:
    config = small_config()
    for group, values in groups.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    return config


@pytest.mark.parametrize(
    ("save", "load", "restarts", "told"),
    [
        (
            "runs/a",
            None,
            "2",
            "2 times more, and each restart begins afresh, not with what --save runs/a holds by then; add",
        ),
        (
            "runs/a",
            "runs/b",
            "1",
            "1 times more, and each restart begins with --load runs/b again, not with what --save",
        ),
        ("runs/a", "runs/a", "2", None),
        ("runs/a", "runs/../runs/a/", "2", None),
        ("runs/a", "linked", "2", None),
        ("runs/a", None, "0", None),
        ("runs/a", None, None, None),
        (None, None, "2", None),
        (None, "runs/b", "2", None),
    ],
)
def test_restarts_that_do_not_go_on_are_told(
    save: str | None,
    load: str | None,
    restarts: str | None,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "runs" / "a")
    for name in ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    if restarts is not None:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    found = module._forgetful_restarts(_config(checkpoint={"save": save, "load": load}))
    assert len(found) == (told is not None)
    assert all(f"torchrun may start the ranks {told}" in text for text in found)


def test_a_tokenizer_that_is_gone_is_that_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    saved = {"lr": 1.0, "vocab_file": str(tmp_path / "there"), "merge_file": str(tmp_path / "gone")}
    copies = {name: f"kept {name}" for name in ("vocab_file", "merge_file")}
    monkeypatch.setattr(
        module, "kept_tokenizer", lambda values, path: copies if (values, path) == (saved, here) else {}
    )
    here = Path("iter_0000001")
    assert module._saved_values(Resume(here, 1, None, saved)) == {**saved, "merge_file": "kept merge_file"}
    assert module._saved_values(Resume(here, 1, None, None)) is None
    assert module._saved_values(None) is None


FOUND: Any = ("a checkpoint",)


@pytest.mark.parametrize(
    ("search", "asked", "problem", "told"),
    [
        (None, True, None, None),
        (Search("ckpt"), False, None, None),
        (Search("ckpt"), True, None, "it holds no checkpoint"),
        (Search("ckpt", FOUND), True, None, None),
        (Search("ckpt"), True, "another problem", None),
        (
            Search("ckpt", error=FileNotFoundError(2, "No such file or directory")),
            True,
            None,
            "No such file or directory",
        ),
        (Search("ckpt", error=DataError("latest is damaged.")), True, None, "latest is damaged"),
    ],
)
def test_why_there_is_nothing_to_load(
    search: Search | None, asked: bool, problem: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_problem", lambda folder, step: problem if (folder, step) == ("ckpt", 5) else "?")
    values = {"exit_on_missing_checkpoint": asked, "ckpt_step": 5}
    assert module._missing_checkpoint(values, search) == told


CURVES: dict[str, Any] = {"lr": 1.0, "global_batch_size": 4, "train_iters": 10}


@pytest.mark.parametrize(
    ("saved", "flags", "different"),
    [
        (CURVES, {}, None),
        ({**CURVES, "lr": 2.0}, {}, "--lr 1.0 instead of 2.0"),
        ({**CURVES, "min_lr": 0.5}, {}, "--min-lr 0.0 instead of 0.5"),
        ({**CURVES, "train_iters": 20}, {}, "decay in samples 40 instead of 80"),
        ({**CURVES, "lr_warmup_iters": 2}, {}, "warmup in samples 0 instead of 8"),
        (
            {**CURVES, "lr": 2.0, "min_lr": 0.5},
            {},
            "--lr 1.0 instead of 2.0, --min-lr 0.0 instead of 0.5",
        ),
        ({**CURVES, "weight_decay": 0.5}, {}, "weight decay 0.01 to 0.01 in 40 samples instead of 0.5 to 0.5 in 40"),
        ({**CURVES, "lr": 2.0}, {"finetune": True}, None),
        ({**CURVES, "lr": 2.0}, {"no_load_optim": True}, None),
        ({**CURVES, "lr": 2.0}, {"override_opt_param_scheduler": True}, None),
        ({**CURVES, "lr": 2.0}, {"use_checkpoint_opt_param_scheduler": True}, None),
        (None, {}, None),
        ({"lr": 2.0, "train_iters": 10}, {}, None),
        ({"lr": 2.0, "global_batch_size": 4}, {}, None),
        ({"global_batch_size": 4, "train_iters": 10}, {}, None),
    ],
)
def test_other_curves_than_the_checkpoints_are_refused(
    saved: dict[str, Any] | None, flags: dict[str, Any], different: str | None
) -> None:
    """Unless they are chosen, or nothing of the optimizer is loaded. Only a run's configuration has any."""
    config = _config(
        optimizer={"lr": 1.0},
        training={"train_iters": 10, "global_batch_size": 4},
        checkpoint={"load": "ckpt", **flags},
    )
    found = module._other_curves(config, Facts(saved=saved))
    assert len(found) == (different is not None)
    for text in found:
        assert text.startswith(
            "the curves of learning rate and weight decay are not those of the checkpoint in --load ckpt: "
        )
        assert f": {different}" in text
        assert "; add --override-opt-param-scheduler to follow the flags, or" in text


def test_a_constant_weight_decay_is_the_same_in_a_longer_run() -> None:
    """Its length changes nothing; that of one which grows does."""
    saved = {**CURVES, "lr_decay_iters": 10, "weight_decay": 0.5}
    flags = {"lr": 1.0, "lr_decay_iters": 10, "weight_decay": 0.5}
    growing = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.5}
    training = {"train_iters": 20, "global_batch_size": 4}
    checkpoint = {"load": "ckpt"}
    config = _config(optimizer=flags, training=training, checkpoint=checkpoint)
    assert module._other_curves(config, Facts(saved=saved)) == []
    config = _config(optimizer={**flags, **growing}, training=training, checkpoint=checkpoint)
    [told] = module._other_curves(config, Facts(saved={**saved, **growing}))
    assert ": weight decay 0.0 to 0.5 in 80 samples instead of 0.0 to 0.5 in 40; add" in told


@pytest.mark.parametrize(
    ("values", "dry_run", "world_size", "given"),
    [
        ({}, False, 3, False),
        ({"world_size": 8}, True, None, False),
        ({"world_size": 8}, False, 3, False),
        ({}, True, 3, False),
        ({"global_batch_size": 4}, False, 3, True),
        ({"micro_batch_size": 4}, False, 3, False),
    ],
)
def test_facts_of_the_launch(
    values: dict[str, Any], dry_run: bool, world_size: int | None, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of ranks is the launcher's, unless a dry run asks about another one."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    facts = module.gather_facts(Typed(values, dry_run=dry_run))
    assert (facts.world_size, facts.global_batch_is_given) == (world_size, given)


@pytest.mark.parametrize(
    ("platform", "named", "there", "missing"),
    [
        ("linux", None, ["g++"], None),
        ("linux", None, ["clang++"], "g++"),
        ("darwin", None, ["clang++"], None),
        ("darwin", None, ["g++"], "clang++"),
        ("linux", "icpx", ["g++"], "icpx"),
        ("linux", "icpx", ["icpx"], None),
    ],
)
def test_the_compiler_that_torch_would_call(
    platform: str, named: str | None, there: list[str], missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.sys, "platform", platform)
    monkeypatch.delenv("CXX", raising=False)
    if named is not None:
        monkeypatch.setenv("CXX", named)
    monkeypatch.setattr(module.shutil, "which", lambda name: name if name in there else None)
    assert module._missing_compiler() == missing


def test_problems_of_a_hugging_face_folder_name_their_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext.families import hf_config

    def refuse(folder: str) -> Any:
        raise ConfigurationError(["one", "two"])

    monkeypatch.setattr(hf_config, "read_hf_config", refuse)
    assert module._huggingface({"load_hf": "folder"}) == ({}, ("--load-hf one", "--load-hf two"))
    monkeypatch.setattr(hf_config, "read_hf_config", lambda folder: (folder, {"num_layers": 2}))
    assert module._huggingface({"load_hf": "folder"}) == ({"num_layers": 2}, ())
    assert module._huggingface({}) == ({}, ())


@pytest.mark.parametrize(
    ("asked", "possible", "steps", "told"),
    [
        ("none", False, 7, []),
        (None, False, 7, []),
        ("full_iteration", True, None, []),
        ("full_iteration", True, 3, []),
        ("full_iteration", True, 0, ["--cuda-graph-warmup-steps 0 is taken for 1"]),
        ("full_iteration", False, None, ["no graph"]),
        ("full_iteration", False, 7, ["no graph", "--cuda-graph-warmup-steps 7 changes nothing here"]),
        ("full_iteration", False, 3, ["no graph"]),
    ],
)
def test_what_is_told_of_graphs(
    asked: str | None, possible: bool, steps: int | None, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default number of steps says nothing."""
    option = SimpleNamespace(default=3)
    monkeypatch.setattr(module, "options_by_name", lambda: {"cuda_graph_warmup_steps": option})
    monkeypatch.setattr(module, "graph_obstacles", lambda config, facts: ["in the way"])
    monkeypatch.setattr(module, "graphs_warning", lambda obstacles: "no graph")
    values = {
        name: value
        for name, value in (("cuda_graph_impl", asked), ("cuda_graph_warmup_steps", steps))
        if value is not None
    }
    config = _config(training={"cuda_graph_impl": "full_iteration" if possible else "none"})
    found = list(module._without_graphs(Typed(values), config, Facts()))
    assert [text.startswith(begin) for text, begin in zip(found, told, strict=True)] == [True] * len(told)


@pytest.mark.parametrize(
    ("flags", "typed", "saved", "told"),
    [
        ({}, {}, None, []),
        (
            {"checkpoint": {"use_checkpoint_args": True, "load": "ckpt"}},
            {},
            None,
            ["--use-checkpoint-args changes nothing"],
        ),
        ({"checkpoint": {"use_checkpoint_args": True, "load": "ckpt"}}, {}, {}, []),
        ({"model": {"no_position_embedding": True}}, {}, None, ["--no-position-embedding changes nothing"]),
        (
            {"layout": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}},
            {},
            None,
            ["--attention-dropout 0 with context parallelism"],
        ),
        ({"layout": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}}, {"cp_comm_type": ("a2a",)}, None, []),
        ({"layout": {"context_parallel_size": 2, "cp_comm_type": ("p2p",)}}, {}, None, []),
        ({"layout": {"context_parallel_size": 1, "cp_comm_type": ("a2a",)}}, {}, None, []),
        (
            {"layout": {"device": "cpu"}},
            {"check_before_update": True, "no_triton_kernels": True},
            None,
            [
                "--check-before-update changes nothing here: with --device cpu numbers",
                "--no-triton-kernels changes nothing here: with --device cpu no Triton kernel",
            ],
        ),
        ({"layout": {"device": "cuda"}}, {"check_before_update": True, "no_triton_kernels": True}, None, []),
        ({"layout": {"device": "cpu"}}, {"check_before_update": False}, None, []),
        (
            {},
            {"transformer_impl": "transformer_engine"},
            None,
            ["--transformer-impl transformer_engine changes nothing here"],
        ),
        ({"model": {"transformer_impl": "transformer_engine"}}, {"transformer_impl": "transformer_engine"}, None, []),
    ],
)
def test_flags_that_change_nothing_are_told(
    flags: dict[str, dict[str, Any]],
    typed: dict[str, Any],
    saved: dict[str, Any] | None,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.attention_kernels, "chooses_nothing", lambda config, backend: None)
    found = module.warnings_of_flags(Typed(typed), _config(**flags), Facts(saved=saved))
    assert [text.startswith(begin) for text, begin in zip(found, told, strict=True)] == [True] * len(told)


EVERYTHING = Facts(
    missing_compiler="g++",
    tokenizer_error="no such file",
    missing_paths=("--data-path a", "--data-path b", "--valid-data-path c"),
    missing_checkpoint="none",
    missing_task_files=("d",),
)


@pytest.mark.parametrize(
    ("values", "changed", "told"),
    [
        ({}, {}, ""),
        ({"torch_compile": True}, {"missing_compiler": None}, "the C++ compiler g++"),
        ({"wandb_project": "p"}, {}, "the package wandb"),
        ({"device": "cuda"}, {"cuda_available": True}, "an NVIDIA GPU (--device cuda)"),
        ({"device": "cuda", "distributed_backend": "gloo"}, {}, ""),
        ({"device": "cpu", "profile": True}, {}, ""),
        ({"profile": True, "use_pytorch_profiler": True}, {}, ""),
        ({"profile": True}, {"cuda_available": True}, "an NVIDIA GPU (--profile)"),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "nowhere", "vocab_size": 31},
            {"tokenizer_error": None, "vocab_size": 31},
            "the tokenizer (31 entries)",
        ),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__}, {}, ""),
        ({"tokenizer_type": "OwnTokenizer", "tokenizer_model": "nowhere"}, {}, ""),
    ],
)
def test_a_dry_run_believes_what_its_flags_name(values: dict[str, Any], changed: dict[str, Any], told: str) -> None:
    """And nothing else: what is missing in any case comes at the end."""
    always = {"missing_paths": (), "missing_task_files": (), "missing_checkpoint": None}
    texts = [
        "the files of --data-path, --valid-data-path",
        "the files that the tasks of --eval-tasks name",
        "the checkpoint in --load",
    ]
    facts, [warning] = assumed_facts(EVERYTHING, Typed(values))
    tokenizer = told if "tokenizer" in told else ""
    parts = [*([told] if told and not tokenizer else []), *texts, *([tokenizer] if tokenizer else [])]
    assert warning == f"--dry-run believes what this machine does not have: {'; '.join(parts)}"
    expected = dataclasses.replace(
        EVERYTHING, **{**always, **changed, "packages": frozenset({"transformer_engine", "wandb"})}
    )
    assert facts == expected


@pytest.mark.parametrize(
    "values", [{"device": "cuda"}, {"wandb_project": "p"}, {"transformer_impl": "transformer_engine"}]
)
def test_nothing_is_believed_of_a_machine_that_has_it(values: dict[str, Any]) -> None:
    facts = Facts(cuda_available=True, packages=frozenset({"transformer_engine", "wandb"}))
    assert assumed_facts(facts, Typed(values)) == (facts, [])
    assert list(believing._missing(Facts(), Typed({}))) == []
