"""Writes to services that show metrics, with the tags of TensorBoard: Comet, MLflow, Trackio, Weights & Biases.

Each is a package that is optional: it is imported where it is asked for, and asked for nowhere else.
"""

import importlib
import itertools
from collections.abc import Mapping
from typing import Any

from megatron_ext.config.schema import LoggingConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.telemetry.metrics import Metrics, scalars


def imported(package: str, flag: str, value: str) -> Any:
    """Return the module `package`, which `flag` needs.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"{flag} {value} needs the {package} package, which is not installed: pip install {package}, or leave the "
            "flag out."
        ) from error


class CometWriter:
    """Writes one Comet experiment; its steps are iterations."""

    def __init__(self, options: LoggingConfig, arguments: Mapping[str, Any]):
        """Start the experiment and record the arguments of ours with it.

        Raises:
            ConfigurationError: the comet_ml package is not installed.
        """
        assert options.comet_project is not None
        comet = imported("comet_ml", "--comet-project", options.comet_project)
        self._experiment = comet.start(workspace=options.comet_workspace, project_name=options.comet_project)
        if options.comet_experiment_name is not None:
            self._experiment.set_name(options.comet_experiment_name)
        self._experiment.log_parameters(dict(arguments))

    def write(self, metrics: Metrics) -> None:
        """Write the values of a step or an evaluation."""
        values = scalars(metrics)
        if values:
            consumed = {"samples vs steps": metrics.consumed_samples}
            self._experiment.log_metrics(values | consumed, step=metrics.iteration)

    def close(self) -> None:
        """End the experiment, once all is sent."""
        self._experiment.end()


# MLflow's servers take no more parameters in one request, and cut longer values off with an error.
_MOST_PARAMETERS, _LONGEST_VALUE = 100, 500


class MlflowWriter:
    """Writes one MLflow run; its steps are iterations."""

    def __init__(self, options: LoggingConfig, arguments: Mapping[str, Any]):
        """Start the run and record the arguments of ours with it.

        Raises:
            ConfigurationError: the mlflow package is not installed.
        """
        assert options.mlflow_experiment is not None
        self._mlflow = imported("mlflow", "--mlflow-experiment", options.mlflow_experiment)
        if options.mlflow_tracking_uri is not None:
            self._mlflow.set_tracking_uri(options.mlflow_tracking_uri)
        self._mlflow.set_experiment(options.mlflow_experiment)
        self._mlflow.start_run(run_name=options.mlflow_run_name)
        texts = ((name, str(value)[:_LONGEST_VALUE]) for name, value in arguments.items())
        while batch := dict(itertools.islice(texts, _MOST_PARAMETERS)):
            self._mlflow.log_params(batch)

    def write(self, metrics: Metrics) -> None:
        """Write the values of a step or an evaluation."""
        values = scalars(metrics)
        if values:
            consumed = {"samples vs steps": metrics.consumed_samples}
            self._mlflow.log_metrics(values | consumed, step=metrics.iteration)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class TrackioWriter:
    """Writes one Trackio run; its steps are iterations. A run of the same name is gone on with."""

    def __init__(self, options: LoggingConfig, arguments: Mapping[str, Any]):
        """Start the run and record the arguments of ours with it.

        Raises:
            ConfigurationError: the trackio package is not installed.
        """
        assert options.trackio_project is not None
        trackio = imported("trackio", "--trackio-project", options.trackio_project)
        self._run = trackio.init(
            project=options.trackio_project,
            name=options.trackio_run_name,
            space_id=options.trackio_space_id,
            config={name: str(value) for name, value in arguments.items()},
            resume="allow",
        )

    def write(self, metrics: Metrics) -> None:
        """Write the values of a step or an evaluation."""
        values = scalars(metrics)
        if values:
            self._run.log(values | {"samples vs steps": metrics.consumed_samples}, step=metrics.iteration)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class WandbWriter:
    """Writes one Weights & Biases run; its steps are iterations, and `samples vs steps` gives the samples of each."""

    def __init__(self, options: LoggingConfig, arguments: Mapping[str, Any]):
        """Start the run and record the arguments of ours with it.

        Raises:
            ConfigurationError: the wandb package is not installed.
        """
        assert options.wandb_project is not None
        wandb = imported("wandb", "--wandb-project", options.wandb_project)
        self._run = wandb.init(
            project=options.wandb_project,
            name=options.wandb_exp_name,
            entity=options.wandb_entity,
            dir=options.wandb_save_dir,
            config=dict(arguments),
        )

    def write(self, metrics: Metrics) -> None:
        """Write the values of a step or an evaluation."""
        self._run.log(scalars(metrics) | {"samples vs steps": metrics.consumed_samples}, step=metrics.iteration)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def sinks(options: LoggingConfig, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the writers that the flags ask for.

    Raises:
        ConfigurationError: the package of one of them is not installed.
    """
    asked = {
        WandbWriter: options.wandb_project,
        MlflowWriter: options.mlflow_experiment,
        CometWriter: options.comet_project,
        TrackioWriter: options.trackio_project,
    }
    return [writer(options, arguments) for writer, named in asked.items() if named is not None]


SINKS = (sinks,)
