"""Runs the main job: build the run, load a checkpoint if there is one, train."""

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext import device, environment
from megatron_ext.checkpoint.native.checkpoint_folder import saved_iterations
from megatron_ext.checkpoint.native.extra_files import other_versions
from megatron_ext.checkpoint.native.lock import give_up, hold_until_exit
from megatron_ext.checkpoint.native.resume import Resume
from megatron_ext.config.derived.optimizer_traits import OptimizerTraits
from megatron_ext.config.schema import CheckpointConfig, Config
from megatron_ext.device import external_kernels, hardware_queues
from megatron_ext.errors import ConfigurationError, PeerLostError, StoppedBySignal, TrainingError
from megatron_ext.gc_freeze import kept_from_the_collector
from megatron_ext.optim.curves import Schedule
from megatron_ext.own_code import hand_over
from megatron_ext.parts.own_parameters import OwnParameters
from megatron_ext.registry import brought
from megatron_ext.resilience import elastic, exit_record, launcher
from megatron_ext.resilience.peer_processes import end_stopped_ranks
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.signals import STOP_FILE, SignalWatcher, StopDeadline
from megatron_ext.telemetry import commands_file
from megatron_ext.telemetry.banner import Begun, banner
from megatron_ext.terminal import say, warn
from megatron_ext.train.configure import Configured, configure, configure_for, next_stage
from megatron_ext.train.extensions import Extensions, LayerSpec, Loss, MakeDatasets, OptimizerClass
from megatron_ext.train.training_result import Trained

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from megatron_ext.device.device_protocol import Device
    from megatron_ext.train.callbacks.standard import History
    from megatron_ext.train.run import Run
    from megatron_ext.train.trainer import Callback


def pretrain(
    config: Configured | Sequence[str],
    status: RunStatus | None = None,
    *,
    callbacks: Sequence["Callback | Callable[[], Callback]"] = (),
    datasets: MakeDatasets | None = None,
    loss: Loss | None = None,
    layer_spec: LayerSpec | None = None,
    layer_parameters: OwnParameters | None = None,
    optimizer: OptimizerTraits | OptimizerClass | None = None,
    learning_rate: Schedule | None = None,
    families: Sequence[Any] = (),
    returns_model: bool = False,
) -> Trained:
    """Train as configured, on this rank: the entry of the library. docs/extending.md has an example of every argument.

    Where the newest checkpoint turns out to be damaged, the flags are resolved once more, for the one that is loaded.
    Without `status` the process is left as it was found, whether the run ends or fails: process groups, threads,
    signal handlers and the lock of --save are given back, and `pretrain` can be called again.

    Args:
        config: flags as for `megatron-ext pretrain`, or what `configure` made of them.
        status: kept up to date for the report of a failure; `megatron_ext.cli.pretrain.start` makes that report.
        callbacks: called after those that the flags ask for; or functions that make one, once megatron-core may be
            imported.
        datasets: makes the datasets of the run, in place of those that the flags name.
        loss: returns the loss of every token, in place of the cross-entropy.
        layer_spec: changes the spec of each layer.
        layer_parameters: names the parameters that a layer then has besides ours.
        optimizer: a class of torch.optim.Optimizer, or traits of one that is not in config/derived/optimizers.py, in
            place of --optimizer.
        learning_rate: changes the rate of each step.
        families: further families of Hugging Face models.
        returns_model: whether what is returned has the model, which otherwise is freed.
    Returns:
        The losses of the steps, and where the run wrote what; the rows of the metrics where there is no `status`.
    Raises:
        TrainingError: something ended the run before its planned end.
    """
    extensions = Extensions(callbacks, datasets, loss, layer_spec, layer_parameters, optimizer, learning_rate, families)
    hand_over(config, vars(extensions))
    with extensions.registered():
        configured, keeps_rows = config if isinstance(config, Configured) else configure(config), status is None
    if configured is not config:
        _print_warnings(configured.typed.warnings)
    with extensions.registered(), _process_given_back(configured.config, status) as (status, ends):
        configured = replace(configured, config=extensions.applied(configured.config))
        _print_warnings(extensions.warnings(configured.typed.values))
        _claim(configured, status)
        here = _install_device(configured.config, status)
        # Only now may megatron-core be imported.
        from megatron_ext.model.names import unwrapped
        from megatron_ext.train.callbacks.stopping import STAGE_OVER

        losses: list[float] = []
        validation_losses: dict[int, float] = {}
        rows: list[dict[str, Any]] = []
        store = None
        with _Requests() as requests:
            while True:
                store = _join_ranks(configured, here, status, ends, store)
                run, history, stop_reason = _train_stage(
                    configured, here, status, extensions, ends, requests, keeps_rows=keeps_rows
                )
                losses += history.losses
                rows += history.rows
                validation_losses |= history.validation_losses
                if stop_reason != STAGE_OVER:
                    break
                del run, history
                gc.collect()  # the model, before there is the next
                configured = next_stage(configured)
                configured = replace(configured, config=extensions.applied(configured.config))
        if status.rank == 0:
            # Nobody waits for this rank any more: the others have ended, and so have the groups.
            for finish in brought("endings") if stop_reason is None else ():
                finish(run.config)
            _record_end(status, run.state.iteration, stop_reason)
        elastic.dismiss_spares()
    names = run.config.checkpoint.save, run.config.logging.metrics_file, run.config.logging.tensorboard_dir
    return Trained(
        run.state.iteration,
        tuple(losses),
        validation_losses,
        stop_reason,
        *(None if name is None else Path(name) for name in names),
        history=tuple(rows),
        model=tuple(unwrapped(run.chunks)) if returns_model else (),
    )


class _Requests(ExitStack):
    """Watches for requests to stop, from the first step of the first stage to the last step of the last stage. A
    request that comes while a stage is saved or the next is built stops the run after the next stage's first step,
    which is saved."""

    signals: SignalWatcher | None = None

    def watched(self, config: Config, status: RunStatus) -> SignalWatcher:
        """Return who has asked so far; begin to watch, where nobody does yet."""
        from megatron_ext.train.callbacks.standard import stop_file

        if self.signals is None:
            save, seconds = config.checkpoint.save, config.training.exit_signal_deadline
            # One rank watches the stop file and tells the others at the end of a step.
            self.signals = SignalWatcher(stop_file(config) if status.rank == 0 else None, launcher.requested_before())
            self.signals.for_good = not config.layout.elastic
            self.enter_context(self.signals)
            saved = lambda: saved_iterations(save) if save else []  # noqa: E731
            self.enter_context(StopDeadline(seconds, self.signals, status, saved))
        return self.signals


def _train_stage(
    configured: Configured,
    here: "Device",
    status: RunStatus,
    extensions: Extensions,
    ends: ExitStack,
    requests: _Requests,
    *,
    keeps_rows: bool,
) -> "tuple[Run, History, str | None]":
    """Build the run, load its checkpoint, and train to the end of its stage, or of the run.

    Returns:
        The run, its losses, and why it ended before the planned end.
    """
    from megatron_ext.train.memory_check import check_it_fits, telling_of_memory

    configured = _with_agreed_checkpoint(configured, extensions)
    if extensions.layer_spec is None:  # the formulas describe our layers
        check_it_fits(configured.config, here)
    with telling_of_memory(configured.config, here):
        configured, attention = _with_chosen_kernels(configured, here)
        run = _build(configured, here, status, extensions, ends)
        _load(run, configured)
        if run.rank == 0:
            say(banner(run.config, _banner_facts(run, extensions, attention)))
        history, stop_reason = _train(
            run, configured.stage_end, status, extensions, ends, requests, keeps_rows=keeps_rows
        )
        ends.close()
    return run, history, stop_reason


def _print_warnings(warnings: Sequence[str]) -> None:
    """Print warnings, on one rank."""
    for warning in warnings if environment.rank() == 0 else ():
        warn(warning)


@contextlib.contextmanager
def _process_given_back(config: Config, status: RunStatus | None) -> Iterator[tuple[RunStatus, ExitStack]]:
    """Leave the process as it was, unless somebody ends it.

    Yields:
        The status, and an ExitStack that collects the run's cleanups. A run that ends well closes it; after an error it
        is closed here.
    """
    ends = ExitStack()
    if status is not None:
        # Its owner reports a failure, with what the watch knows of it, and ends the process at once: groups whose other
        # ranks are gone may not hold that up.
        yield status, ends
        return
    save = config.checkpoint.save
    with ExitStack() as process:
        process.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
        if save is not None:
            process.callback(give_up, save)
        status = RunStatus(environment.rank(), save=save)
        try:
            yield status, ends
        except BaseException:
            # NCCL's groups would wait for operations in which another rank, which has failed, never takes part.
            gives_back = environment.world_size() == 1 or config.layout.device == "cpu"
            with contextlib.suppress(Exception):  # the error that ended the run is the one to be seen
                if gives_back:
                    ends.close()
                elif status.watch is not None:
                    status.watch.close()
            raise


def _install_device(config: Config, status: RunStatus) -> "Device":
    """Return the device, and import the modules that compute on it."""
    warning = hardware_queues.prepare(config.layout)
    if warning and status.rank == 0:
        warn(warning)
    with kept_from_the_collector():
        here = device.install(
            config.layout.device,
            fuses=not config.training.disable_jit_fuser,
            own_kernels=not config.training.no_triton_kernels,
            kernels=external_kernels.asked_for(config),
            nccl_backend=config.layout.nccl_backend,
        )
        require_products(config, here)
        import megatron_ext.train.build  # noqa: F401 (with torch and megatron-core)
    return here


def _join_ranks(
    configured: Configured, here: "Device", status: RunStatus, ends: ExitStack, before: "Store | None"
) -> "Store | None":
    """Make the group of all ranks, and watch them from now on. It follows from typed flags alone, which no checkpoint
    changes.

    Args:
        before: the store of an earlier stage of the run.
    Returns:
        The store of the ranks; None where another has made their group.
    """
    from megatron_ext.parallel import groups
    from megatron_ext.sharding.choose import sharding_of
    from megatron_ext.train.callbacks import profiling
    from megatron_ext.train.start_watchdog import begin_watch

    config = configured.config
    ends.callback(_set_determinism, _determinism())
    profiling.begin(config, status.rank, here)
    if configured.search is None:  # before the ranks meet, where it can be known
        _require_checkpoint(config.checkpoint, configured.resume)
    try:
        store = groups.start(config.layout, here, from_host=sharding_of(config).lives_on_host, before=before)
    except PeerLostError as error:
        raise PeerLostError(f"{error}{end_stopped_ranks()}") from error
    ends.callback(groups.destroy)
    elastic.keep_spares()
    status.watch = begin_watch(status, config.layout, here, store)
    ends.callback(status.watch.close)
    return store


def _determinism() -> tuple[bool, bool]:
    """Return whether torch takes deterministic algorithms alone, and whether it only warns of others."""
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(before: tuple[bool, bool]) -> None:
    """Set what `_determinism` has returned. torch imports a part of its compiler to do so: only where it differs."""
    import torch

    if _determinism() != before:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _with_agreed_checkpoint(configured: Configured, extensions: Extensions) -> Configured:
    """Return the configuration for the checkpoint that all ranks go on from."""
    if configured.search is not None:
        from megatron_ext.checkpoint.native.agreed_checkpoint import agree

        search, before = configured.search, configured.typed.warnings
        newer = (kept.newest(configured.config, search) for kept in brought("newer_states"))
        resume = next(filter(None, newer), None) or agree(search, configured.config.checkpoint)
        configured = configure_for(configured, resume)
        _print_warnings([warning for warning in configured.typed.warnings if warning not in before])
        configured = replace(configured, config=extensions.applied(configured.config))
    _require_checkpoint(configured.config.checkpoint, configured.resume)
    return configured


def require_products(config: Config, here: "Device") -> None:
    """Raise ConfigurationError where the flags ask for products that this rank's device does not have."""
    for missing in filter(None, (formats.missing(config, here) for formats in brought("product_formats"))):
        raise ConfigurationError(missing)


def _with_chosen_kernels(configured: Configured, here: "Device") -> tuple[Configured, str | None]:
    """Return the configuration with the kernels that compute on this device, and the banner's text about attention."""
    from megatron_ext.parts.attention import choice
    from megatron_ext.train.build import with_chosen_gemm

    resume = configured.resume
    attention = choice.choose(configured.config, here, None if resume is None else resume.saved)
    return replace(configured, config=with_chosen_gemm(attention.config, here, resume)), attention.text


def _build(configured: Configured, here: "Device", status: RunStatus, extensions: Extensions, ends: ExitStack) -> "Run":
    from megatron_ext.train.build import build_run

    status.progress.phase = "the construction of the model and its data"
    run = build_run(configured.config, here, configured.resume, extensions)
    ends.callback(run.loaders.close)
    ends.callback(run.release_graph)
    run.progress = status.progress
    for flag in run.sharding.host_memory_flags:
        if here.kind == "cpu" and run.rank == 0:
            say(f"warning: {flag} saves nothing with --device cpu: it is the same memory")
    return run


def _train(
    run: "Run",
    stage_end: int | None,
    status: RunStatus,
    extensions: Extensions,
    ends: ExitStack,
    requests: _Requests,
    *,
    keeps_rows: bool,
) -> "tuple[History, str | None]":
    """Take the steps up to the end of the stage; return their losses, and why they ended before the planned end.

    Raises:
        StoppedBySignal: the run was stopped, and is saved.
    """
    from megatron_ext.model.own_layers import of_plugins_elsewhere
    from megatron_ext.train.callbacks.own_parts import OwnParts
    from megatron_ext.train.callbacks.standard import History, standard_callbacks
    from megatron_ext.train.callbacks.stopping import STAGE_OVER, StageEnd
    from megatron_ext.train.trainer import Trainer

    signals, history = requests.watched(run.config, status), History()
    standard = standard_callbacks(run, signals, status, [history] if keeps_rows else [])
    callbacks = [*standard, StageEnd(stage_end), history, *extensions.made_callbacks()]
    if extensions.layer_spec is not None or of_plugins_elsewhere(run.chunks):
        callbacks.insert(0, OwnParts())
    for callback in callbacks:
        ends.callback(callback.close)
    trainer = Trainer(run, callbacks, extensions.learning_rate)
    try:
        trainer.fit()
    except StoppedBySignal as stop:
        run.release_graph()
        if signals.for_good:
            launcher.remember_stop(stop.exit_code, str(stop))
            elastic.dismiss_spares()
        raise
    if trainer.stop_reason != STAGE_OVER:
        if trainer.stop_reason is not None:
            launcher.remember_stop(0, trainer.stop_reason)
        requests.close()
    return history, trainer.stop_reason


def _require_checkpoint(flags: CheckpointConfig, resume: Resume | None) -> None:
    """Raise where --exit-on-missing-checkpoint says so."""
    if resume is None and flags.load is not None and flags.exit_on_missing_checkpoint:
        raise ConfigurationError(
            f"--load {flags.load} holds no checkpoint; name a folder that does, "
            "or leave out --exit-on-missing-checkpoint to start afresh"
        )


def _load(run: "Run", configured: Configured) -> None:
    """Load the agreed checkpoint, or the Hugging Face model that the flags name in its place; say which."""
    flags, resume = run.config.checkpoint, configured.resume
    run.progress.phase = "loading what it begins with"
    iteration = 0
    if resume is not None:
        from megatron_ext.checkpoint.native.load_checkpoint import load_saved
        from megatron_ext.train.datasets import check_data_is_that_of_the_checkpoint

        if resume.is_snapshot:
            [kept] = brought("newer_states")
            iteration = kept.restore(run, resume.iteration)
        else:
            iteration = load_saved(run, resume)
        if not flags.finetune and not configured.begins_stage:
            check_data_is_that_of_the_checkpoint(run, resume)
    if flags.load is not None and run.rank == 0:
        verb = "finetuning from" if flags.finetune else "resuming at"
        what = f"{verb} iteration {iteration} of" if resume is not None else "starting afresh: none in"
        where = f"the snapshots in {resume.path.parent}" if resume is not None and resume.is_snapshot else flags.load
        say(f"checkpoint: {what} {where}")
        if resume is not None and not resume.is_snapshot and (other := other_versions(resume.path)) is not None:
            warn(other)
    for fill in brought("initial_weights") if resume is None else ():
        fill(run)


def _record_end(status: RunStatus, iteration: int, stop_reason: str | None) -> None:
    """Leave the record of an end that is no failure, and say why it came before the planned one."""
    how = "done" if stop_reason is None else f"stopped: {stop_reason}"
    if stop_reason is not None:
        say(f"{how} at iteration {iteration}")
    message = f"rank 0: {how} at iteration {iteration}"
    exit_record.write(status.save, code=0, rank=0, message=message, iteration=iteration)


def _banner_facts(run: "Run", extensions: Extensions, attention: str | None) -> Begun:
    """Return the facts that the banner prints besides the configuration."""
    return Begun(
        device=run.device.model_name,
        backend=run.device.backend_text(),
        iteration=run.state.iteration,
        consumed_samples=run.state.consumed_samples,
        own=extensions.named(),
        kernels=external_kernels.kernels_text(),
        attention=attention,
    )


def _claim(configured: Configured, status: RunStatus) -> None:
    """Make the save folder this job's own, and record its command there. Rank 0 does."""
    save = configured.config.checkpoint.save
    if save is None or status.rank != 0:
        return
    try:
        if (Path(save) / STOP_FILE).is_dir():
            raise ConfigurationError(
                f"--save {save} holds a folder named {STOP_FILE}, but a file of that name is what stops a run; rename "
                "it"
            )
        hold_until_exit(save)
    except TrainingError:
        status.save = None  # the folder is another run's: leave no record in it
        raise
    exit_record.clear(save)
    commands_file.record_start(save, configured.typed.words, configured.config.layout.world_size)
