"""What the functions that wire a run hand from one part to the next, by stand-ins that record what they are given."""

import dataclasses
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import CheckpointConfig, Config
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.parallel import groups as process_groups
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.sharding import choose, fsdp2
from megatron_ext.sharding.fsdp2 import TorchFSDP
from megatron_ext.train import attention_kernel, build, memory_check, pretrain, trainer, watching, weight_decay
from megatron_ext.train.callbacks import history, memory_history, standard
from megatron_ext.train.configure import Configured
from megatron_ext.train.datasets import Splits
from megatron_ext.train.extensions import Extensions
from megatron_ext.train.run import Run
from tests.support.small_models import small_config

NOTHING: Any = None

LOADER_FLAGS: list[tuple[dict[str, dict[str, Any]], dict[str, Any]]] = [
    ({}, {}),
    ({"data": {"reset_position_ids": True}}, {"restarts_positions": True}),
    ({"data": {"reset_attention_mask": True}}, {"separates_documents": True}),
    ({"data": {"eod_mask_loss": True}}, {}),
    ({"data": {"num_workers": 0}}, {"num_workers": 0}),
    ({"data": {"num_workers": 5}}, {"num_workers": 5}),
    ({"layout": {"cp_comm_type": ("a2a",)}}, {"documents_are_whole": True}),
    ({"layout": {"cp_comm_type": ("a2a", "p2p")}}, {"documents_are_whole": True}),
    ({"layout": {"cp_comm_type": ("p2p", "a2a")}}, {}),
    ({"model": {"seq_length": 8}}, {"seq_length": 8}),
    ({"training": {"micro_batch_size": 6}}, {"micro_batch_size": 6}),
    ({"training": {"eval_micro_batch_size": 6}}, {}),
]


def _config(flags: dict[str, dict[str, Any]]) -> Config:
    config = small_config()
    for group, values in flags.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    return config


@pytest.mark.parametrize(("flags", "expected"), LOADER_FLAGS)
def test_a_flag_of_the_loader_is_one_argument(
    flags: dict[str, dict[str, Any]], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size and number of a rank is another one."""
    made: list[dict[str, Any]] = []
    dataset = MockDataset(vocab_size=250, seq_length=16, num_samples=40, seed=1, split=0)
    monkeypatch.setattr(build, "BatchLoader", lambda dataset, **named: made.append(named))
    monkeypatch.setattr(build, "tokenizer_of_run", lambda config: SimpleNamespace(vocab_size=251, eod=7))
    monkeypatch.setattr(build, "datasets_of_run", lambda *_: Splits(dataset, None, None))
    places = {"pp": (1, 3), "dp": (2, 5), "cp": (3, 4)}
    ranks: Any = SimpleNamespace(
        **{
            name: SimpleNamespace(rank=lambda rank=rank: rank, size=lambda size=size: size)
            for name, (rank, size) in places.items()
        }
    )
    here: Any = SimpleNamespace(kind="cpu")
    build.build_loaders(_config(flags), here, ranks)
    [given] = made
    found = {**given, **vars(given["view"])}
    for name in ("view", "describe", "skipped"):
        del found[name]
    assert found == {
        "vocab_size": 251,
        "seq_length": 16,
        "micro_batch_size": 2,
        "dp_rank": 2,
        "dp_size": 5,
        "is_first_stage": False,
        "is_last_stage": False,
        "cp_rank": 3,
        "cp_size": 4,
        "eod": 7,
        "restarts_positions": False,
        "separates_documents": False,
        "documents_are_whole": False,
        "num_workers": 2,
        "pin_memory": False,
        "reads_ahead": False,
        **expected,
    }


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("from_host", [False, True])
@pytest.mark.parametrize(("level", "ranges"), [(0, None), (0, "ranges"), (2, None), (2, "ranges")])
@pytest.mark.parametrize("compiles", [False, True])
def test_each_part_of_a_run_is_given_what_was_made_before(
    compiles: bool, level: int, ranges: Any, from_host: bool, on_meta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is given timers for a log of them, and for ranges of a trace."""
    config = _config({"logging": {"timing_log_level": level}, "training": {"torch_compile": compiles}})
    config = dataclasses.replace(config, layout=dataclasses.replace(config.layout, world_size=2))
    heard: list[Any] = []
    core: Any = SimpleNamespace(timers=None)
    chunk = SimpleNamespace(own_loss=None)
    part = SimpleNamespace(config=SimpleNamespace(timers=None))
    optimizer = SimpleNamespace(chained_optimizers=[part], scale_loss="scale")

    def given(name: str, result: Any) -> Any:
        return lambda *given, **named: heard.append((name, given, named)) or result

    sharding = SimpleNamespace(
        lives_on_host=from_host,
        builds_on_meta=on_meta,
        shard=given("shard", ["wrapped"]),
        optimizer=given("optimizer", optimizer),
        weights_in_place=given("weights", nullcontext()),
        parts=given("parts", "parts"),
    )
    ranks = SimpleNamespace(pp="stages")
    device: Any = SimpleNamespace(kind="cuda", synchronize="synchronize")
    resume: Any = "resume"
    loaders = SimpleNamespace(samples="samples")
    extensions: Any = Extensions(loss=lambda logits: NOTHING, layer_spec=lambda spec, layer: spec)
    names = {
        "sharding_of": sharding,
        "set_kernels": None,
        "seed_dropout": None,
        "transformer_config": core,
        "build_model": [chunk],
        "mark_own_parameters": None,
        "compile_layers": None,
        "check_weight_decay": None,
        "open_range": ranges,
        "Timers": "timers",
        "build_loaders": loaders,
        "GradientWatch": "watch",
        "P2PCommunicator": "p2p",
        "record_of_run": "record of the data",
        "captured_passes": "captured",
    }
    for name, result in names.items():
        monkeypatch.setattr(build, name, given(name, result))
    monkeypatch.setattr(build, "process_groups", SimpleNamespace(initialize=given("groups", ranks)))
    run = build.build_run(config, device, resume, extensions)
    assert heard == [
        ("sharding_of", (config,), {}),
        ("groups", (config.layout, device), {"from_host": from_host}),
        ("set_kernels", (config, device), {}),
        ("seed_dropout", (config, ranks), {}),
        ("transformer_config", (config, "cuda"), {"on_meta": on_meta}),
        ("build_model", (config, core, ranks), {"on_meta": on_meta, "layer_spec": extensions.layer_spec}),
        ("mark_own_parameters", ([chunk], config), {}),
        *([("compile_layers", ([chunk],), {})] if compiles else []),
        ("shard", ([chunk], core, ranks, device), {}),
        ("optimizer", (["wrapped"], ranks, device), {}),
        ("weights", (["wrapped"],), {}),
        ("parts", (optimizer,), {}),
        ("check_weight_decay", ("parts", ["wrapped"], config), {}),
        ("open_range", (config,), {}),
        ("Timers", (level, "synchronize", ranges), {}),
        ("build_loaders", (config, device, ranks, "resume", extensions), {}),
        ("GradientWatch", (["wrapped"], sharding), {"alone": False}),
        ("P2PCommunicator", (), {"pp_group": "stages", "config": core}),
        ("record_of_run", (config, "samples", "resume"), {}),
        ("captured_passes", (config, device, ["wrapped"], "watch"), {}),
    ]
    assert chunk.own_loss is extensions.loss
    timers = "timers" if level or ranges else None
    assert (core.timers, part.config.timers, core.grad_scale_func) == (timers, timers, "scale")
    assert (run.loaders, run.data_record, run.captured_passes, run.timers) == (
        loaders,
        "record of the data",
        "captured",
        "timers",
    )
    assert (run.optimizer, run.sharding, run.groups, run.p2p) == (optimizer, sharding, ranks, "p2p")


@pytest.mark.parametrize("no_triton", [False, True])
@pytest.mark.parametrize("no_fuser", [False, True])
@pytest.mark.parametrize(("search", "snapshot"), [(None, None), ("search", None), ("search", "snapshot")])
@pytest.mark.parametrize("own_layers", [False, True])
def test_the_way_from_flags_to_the_training(
    own_layers: bool,
    search: Any,
    snapshot: Any,
    no_fuser: bool,
    no_triton: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the ranks agree on is asked for where there is a folder to load, a snapshot first; memory is judged where
    the layers are ours."""
    heard: list[Any] = []

    def given(name: str, result: Any = None) -> Any:
        return lambda *given, **named: heard.append((name, given, named)) or result

    from megatron_ext.checkpoint.local import agreement as snapshots
    from megatron_ext.checkpoint.native import agreement as checkpoints

    config = _config(
        {
            "training": {"disable_jit_fuser": no_fuser, "no_triton_kernels": no_triton},
            "checkpoint": {"load": search and "folder"},
        }
    )
    typed: Any = SimpleNamespace(values={}, warnings=())
    configured = Configured(config, typed, typed, search, None)
    chosen = dataclasses.replace(config)
    here: Any = SimpleNamespace(kind="cpu")
    for module, name, result in (
        (pretrain.hardware_queues, "prepare", None),
        (pretrain.device, "install", here),
        (pretrain.external_kernels, "asked_for", "kernels"),
        (pretrain, "require_fp8", None),
        (memory_history, "begin", None),
        (process_groups, "start", "store"),
        (choose, "sharding_of", SimpleNamespace(lives_on_host=True)),
        (pretrain.elastic, "keep_spares", None),
        (watching, "begin_watch", SimpleNamespace(close=print)),
        (snapshots, "newest_snapshot", snapshot),
        (checkpoints, "agree", "checkpoint"),
        (memory_check, "check_it_fits", None),
        (memory_check, "telling_of_memory", nullcontext()),
        (attention_kernel, "choose", SimpleNamespace(config=chosen, text="the kernel of attention")),
        (pretrain, "_build_and_train", None),
    ):
        monkeypatch.setattr(module, name, given(name, result))
    monkeypatch.setattr(
        pretrain, "configure_for", lambda configured, found: dataclasses.replace(configured, resume=found)
    )
    status = RunStatus(1)
    extensions = Extensions(layer_spec=(lambda spec, layer: spec) if own_layers else None)
    ends = ExitStack()
    pretrain._pretrain(configured, status, extensions, ends)
    resume = search and (snapshot or "checkpoint")
    final = dataclasses.replace(configured, config=chosen, resume=resume)
    agreed = [("newest_snapshot", (config, "search"), {})] if search else []
    agreed += [("agree", ("search", config.checkpoint), {})] if search and not snapshot else []
    install = {"fuses": not no_fuser, "own_kernels": not no_triton, "kernels": "kernels"}
    assert heard == [
        ("prepare", (config.layout,), {}),
        ("asked_for", (config,), {}),
        ("install", (config.layout.device,), install),
        ("require_fp8", (config.training, here), {}),
        ("begin", (config, 1, here), {}),
        ("sharding_of", (config,), {}),
        ("start", (config.layout, here), {"from_host": True}),
        ("keep_spares", (), {}),
        ("begin_watch", (status, config.layout, here, "store"), {}),
        *agreed,
        *([] if own_layers else [("check_it_fits", (config, here), {})]),
        ("telling_of_memory", (config, here), {}),
        ("choose", (config, here, resume), {}),
        ("_build_and_train", (final, here, status, extensions, "the kernel of attention", ends), {}),
    ]


@pytest.mark.parametrize("loads", [False, True])
def test_own_parts_are_applied_to_the_flags_of_the_checkpoint_that_is_loaded(
    loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks may agree on another one than the configuration was made with; own parts come after that."""
    from megatron_ext.checkpoint.local import agreement as snapshots
    from megatron_ext.checkpoint.native import agreement as checkpoints

    first, second = _config({"training": {"seed": 5}}), _config({"training": {"seed": 6}})
    typed: Any = SimpleNamespace(values={}, warnings=("said before",))
    search: Any = "search" if loads else None
    configured = Configured(first, typed, typed, search, None)
    here: Any = SimpleNamespace(kind="cpu")
    for module, name, result in (
        (pretrain.hardware_queues, "prepare", None),
        (pretrain.device, "install", here),
        (pretrain.external_kernels, "asked_for", "kernels"),
        (pretrain, "require_fp8", None),
        (memory_history, "begin", None),
        (process_groups, "start", "store"),
        (choose, "sharding_of", SimpleNamespace(lives_on_host=False)),
        (pretrain.elastic, "keep_spares", None),
        (watching, "begin_watch", SimpleNamespace(close=print)),
        (snapshots, "newest_snapshot", None),
        (checkpoints, "agree", "checkpoint"),
        (memory_check, "telling_of_memory", nullcontext()),
    ):
        monkeypatch.setattr(module, name, lambda *_, result=result, **__: result)
    later: Any = SimpleNamespace(values={}, warnings=("said before", "of that checkpoint"))
    monkeypatch.setattr(
        pretrain,
        "configure_for",
        lambda configured, found: dataclasses.replace(configured, config=second, typed=later, resume=found),
    )
    asked: list[Config] = []
    built: list[tuple[Config, Any]] = []
    said: list[str] = []
    monkeypatch.setattr(pretrain, "_tell", said.extend)
    monkeypatch.setattr(memory_check, "check_it_fits", lambda config, device: asked.append(config))
    monkeypatch.setattr(
        attention_kernel, "choose", lambda config, *_: SimpleNamespace(config=config, text="the kernel")
    )
    monkeypatch.setattr(
        pretrain, "_build_and_train", lambda configured, *_: built.append((configured.config, configured.resume))
    )

    class Own(Extensions):
        def applied(self, config: Config) -> Config:
            return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, optimizer="own"))

    pretrain._pretrain(configured, RunStatus(1), Own(), ExitStack())
    chosen = second if loads else first
    expected = dataclasses.replace(chosen, optimizer=dataclasses.replace(chosen.optimizer, optimizer="own"))
    assert built == [(expected, "checkpoint" if loads else None)]
    assert asked == [expected], "memory is judged of what is trained"
    assert said == (["of that checkpoint"] if loads else []), "each warning once"


@pytest.mark.parametrize("elastic", [False, True])
def test_the_loop_is_given_the_callbacks_of_all(elastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []

    def given(name: str, result: Any = None) -> Any:
        return lambda *given, **named: heard.append((name, given, named)) or result

    config = _config(
        {
            "training": {"exit_signal_deadline": 11.0, "exit_duration_in_mins": 12.0, "exit_interval": 13},
            "layout": {"elastic": elastic},
            "checkpoint": {"save": "folder", "load": "other"},
        }
    )
    run: Any = SimpleNamespace(
        rank=1,
        state=SimpleNamespace(iteration=5),
        sharding=SimpleNamespace(host_memory_flags=()),
        release_graph=given("release"),
        loaders=SimpleNamespace(close=given("close")),
        chunks=[],
    )
    signals = SimpleNamespace(for_good=None)
    watched = nullcontext(signals)
    own, of_flags = trainer.Callback(), trainer.Callback()
    for module, name, result in (
        (pretrain, "StopDeadline", nullcontext()),
        (pretrain.launch, "requested_before", "before"),
        (pretrain, "saved_iterations", [3]),
        (pretrain, "_load", None),
        (pretrain, "SignalWatcher", watched),
        (build, "build_run", run),
        (standard, "standard_callbacks", [of_flags]),
        (trainer, "Trainer", SimpleNamespace(fit=given("fit"), stop_reason=None)),
        (history, "History", losses := history.History()),
        (pretrain.elastic, "dismiss_spares", None),
    ):
        monkeypatch.setattr(module, name, given(name, result))
    status, here = RunStatus(1), SimpleNamespace(kind="cpu")
    ends = ExitStack()
    ends.callback(given("what is left"))
    extensions = Extensions(callbacks=(own,), learning_rate=lambda samples, rate: rate)
    configured: Any = SimpleNamespace(config=config, resume="resume")
    pretrain._build_and_train(configured, here, status, extensions, "text", ends)  # pyright: ignore[reportArgumentType]
    [deadline] = [one for one in heard if one[0] == "StopDeadline"]
    assert deadline[1][3]() == [3], "the saved iterations of --save"
    assert [one for one in heard if one[0] != "StopDeadline"] == [
        ("build_run", (config, here, "resume", extensions), {}),
        ("_load", (run, config.checkpoint, "resume"), {}),
        ("requested_before", (), {}),
        ("SignalWatcher", (None, "before"), {}),
        ("History", (), {}),
        ("standard_callbacks", (run, signals, status), {}),
        ("Trainer", (run, [of_flags, losses, own], extensions.learning_rate), {}),
        ("fit", (), {}),
        *((name, (), {}) for name in ("release", "close", "what is left", "dismiss_spares")),
        ("saved_iterations", ("folder",), {}),
    ]
    assert deadline[1][:3] == (11.0, signals, status)
    assert run.progress is status.progress
    assert watched.for_good is (not elastic)  # pyright: ignore[reportAttributeAccessIssue]
    assert pretrain._saved(CheckpointConfig()) == []


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("kind", "unpinned"), [("cuda", False), ("cuda", True), ("cpu", False)])
def test_flags_of_torchs_fsdp(keeps: bool, kind: str, unpinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether gathered weights are kept after a forward pass, and whether host memory is pinned."""
    asked: list[dict[str, Any]] = []
    model: Any = torch.nn.Module()
    model.set_gradient_divide_factor = model.set_force_sum_reduction_for_comms = lambda value: None
    asked_as_tied: list[bool] = []
    monkeypatch.setattr(fsdp2, "_BaseDataParallel", SimpleNamespace(__init__=lambda self, config, module: None))
    monkeypatch.setattr(fsdp2, "_units", lambda module, tied: asked_as_tied.append(tied) or [module])
    monkeypatch.setattr(fsdp2, "_mesh", lambda groups, kind: (groups, kind))
    monkeypatch.setattr(fsdp2, "FSDPModule", torch.nn.Module)
    monkeypatch.setattr(fsdp2, "fully_shard", lambda unit, **named: asked.append(named))
    core: Any = SimpleNamespace(params_dtype=torch.bfloat16, recompute_granularity=None)
    sharded: Any = TorchFSDP.__new__(TorchFSDP)
    torch.nn.Module.__init__(sharded)
    config = _config(
        {
            "layout": {"torch_fsdp2_cpu_offload": True, "torch_fsdp2_no_reshard_after_forward": keeps},
            "optimizer": {"no_pin_cpu_params": unpinned},
            "model": {"untie_embeddings_and_output_weights": keeps},
        }
    )
    settings: Any = "settings"
    ranks: Any = "groups"
    sharded.__init__(config, core, settings, model, ranks, SimpleNamespace(type=kind))
    [named] = asked
    assert named["reshard_after_forward"] is not keeps
    assert named["offload_policy"].pin_memory is ((kind, unpinned) == ("cuda", False))
    assert named["mesh"] == ("groups", kind)
    assert asked_as_tied == [not keeps]
    assert sharded.ddp_config == "settings"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"decays": 0.0}, "decays (times 0, and the catalogue says 1)"),
        ({"decays": 0.5}, "decays (times 0.5, and the catalogue says 1)"),
        ({"stays": 1.0}, "stays (times 1, and the catalogue says 0)"),
        ({"decays": None}, None),
        ({"stays": None}, "stays (times 1, and the catalogue says 0)"),
        ({"unknown": 0.0}, "unknown (times 0, and the catalogue says 0)"),
        ({"unknown": 1.0}, "unknown (times 1, and the catalogue says 0)"),
    ],
)
def test_what_decays_is_what_the_catalogue_says(
    changed: dict[str, float | None], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wholly or not at all; a group that says nothing decays. Of a stack of experts each is looked at."""
    factors = {"decays": 1.0, "stays": 0.0, "experts": 1.0, **changed}
    weights = {name: torch.nn.Parameter(torch.zeros(2)) for name in factors}
    mains = {name: torch.zeros(2) for name in factors}
    catalogue = {"decays": True, "stays": False, "expert 0": True, "expert 1": True}
    listed = [SimpleNamespace(name=name, decay=decay) for name, decay in catalogue.items()]
    monkeypatch.setattr(weight_decay, "parameters", lambda config: listed)
    monkeypatch.setattr(weight_decay, "global_named_parameters", lambda chunks: list(weights.items()))
    monkeypatch.setattr(
        weight_decay,
        "by_expert",
        lambda name, shape: [("expert 0", shape), ("expert 1", shape)] if name == "experts" else [(name, shape)],
    )
    groups = [
        {"params": [mains[name]], **({} if factor is None else {"wd_mult": factor})} for name, factor in factors.items()
    ]
    part: Any = SimpleNamespace(
        core=SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups)),
        main_parameters=lambda: [(weights[name], mains[name]) for name in factors],
    )
    if told is None:
        weight_decay.check_weight_decay([part], [], small_config())
        return
    with pytest.raises(AssertionError) as raised:
        weight_decay.check_weight_decay([part], [], small_config())
    assert str(raised.value) == f"weight decay of parameter groups is not that of the catalogue: {told}"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("ranks", "has_store", "boards"), [(1, True, False), (2, True, True), (2, False, False)])
def test_the_watch_over_a_rank(
    ranks: int, has_store: bool, boards: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks write on a board in a store of their own; one that is alone is watched alone. The limit is in seconds."""
    made: list[Any] = []
    started: list[bool] = []

    def watch(*given: Any, **named: Any) -> Any:
        made.append((given, named))
        return SimpleNamespace(start=lambda: started.append(True))

    monkeypatch.setattr(watching, "Watch", watch)
    monkeypatch.setattr(watching, "Board", lambda *given: ("board", *given))
    monkeypatch.setattr(watching, "OperationMarks", lambda progress: ("marks", progress))
    monkeypatch.setattr(watching, "_flight_recorder", lambda backend: ("recorder", backend))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    status = RunStatus(1)
    layout = _config({"layout": {"distributed_timeout_minutes": 2.5}}).layout
    here: Any = SimpleNamespace(kind=kind, backend="gloo")
    store: Any = SimpleNamespace(clone=lambda: "a connection of its own") if has_store else None
    assert watching.begin_watch(status, layout, here, store) is not None
    [(given, named)] = made
    board = ("board", "a connection of its own", 1, ranks) if boards else None
    assert given == (status, 150.0, board, watching.describe)
    assert named.pop("flight_recorder")() == ("recorder", "gloo")
    assert named == {"marks": ("marks", status.progress), "device_runs_ahead": kind == "cuda"}
    assert started == [True]


def test_a_group_is_described_by_name_purpose_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(group_name="17", group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda given: [4, 5] if given is group else [])
    assert watching.describe(group) == ("17", "the group tensor-model-parallel", (4, 5))


@pytest.mark.parametrize(
    ("rank", "size", "first", "last"),
    [(0, 1, True, True), (0, 3, True, False), (1, 3, False, False), (2, 3, False, True)],
)
def test_where_a_rank_is(rank: int, size: int, first: bool, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stage, and whether it is the one that logs: the last of all."""
    stages = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    run: Any = Run.__new__(Run)
    run.groups = SimpleNamespace(pp=stages)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2 * rank + 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2 * size)
    assert (run.is_first_stage, run.is_last_stage, run.is_last_rank) == (first, last, last)
    assert (run.rank, run.world_size) == (2 * rank + 1, 2 * size)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2 * rank)
    assert not run.is_last_rank


def test_a_graph_is_freed_where_there_is_one() -> None:
    released: list[bool] = []
    run: Any = Run.__new__(Run)
    for captured in (None, SimpleNamespace(release=lambda: released.append(True))):
        run.captured_passes = captured
        run.release_graph()
    assert released == [True]
