"""Begins a run with a Hugging Face folder: --load-hf gives the model's flags, and the weights of a new run."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.huggingface.at_end import model_can_be_exported, problem_of_folder
from megatron_ext.terminal import say

if TYPE_CHECKING:
    from megatron_ext.train.run import Run


def facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model that --load-hf names, as values of flags, and why it could not be read."""
    folder = values.get("load_hf")
    export = values.get("export_hf_at_end")
    problem = None if export is None else problem_of_folder(export)
    if problem is not None:
        return {"huggingface_problems": (problem,)}
    if folder is None:
        return {}
    from megatron_ext.plugins.huggingface.huggingface_folder import read_model  # with every family

    try:
        model = read_model(folder)[1]
    except ConfigurationError as error:
        return {"huggingface_problems": tuple(f"--load-hf {problem}" for problem in error.problems)}
    if values.get("moe_router_load_balancing_type"):  # other losses, for which the folder has no coefficients
        model = {name: value for name, value in model.items() if name != "moe_aux_loss_coeff"}
    return {"huggingface": model}


def model_is_the_one_to_load(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the model's flags describe the model of --load-hf."""
    yield from facts.huggingface_problems
    if not facts.huggingface:
        return
    from megatron_ext.plugins.families.hf_config import differences  # with every family

    different = differences(config, facts.huggingface)
    if different:
        yield (
            f"--load-hf {config.checkpoint.load_hf}: its config.json describes another model: {'; '.join(different)}. "
            "Leave these flags out: they are then taken from there"
        )


def warnings(values: Mapping[str, Any], config: Config, facts: Facts) -> Iterator[str]:
    """Yield which flags contradict the folder's own numbers about training."""
    if not facts.huggingface:
        return
    from megatron_ext.plugins.families.hf_config import of_the_training  # with every family

    for words in of_the_training(str(config.checkpoint.load_hf), facts.huggingface, values):
        yield f"--load-hf: {words}"


def load(run: "Run") -> None:
    """Fill the weights of a new run where --load-hf asks for it, and say so."""
    folder = run.config.checkpoint.load_hf
    if folder is None:
        return
    from megatron_ext.plugins.huggingface.load_hf import load_huggingface

    remarks = load_huggingface(run, folder)
    if run.rank == 0:
        for remark in remarks:
            say(f"checkpoint: {remark}")
        say(f"checkpoint: beginning with the weights of {folder}")


FACTS, RULES = (facts,), (model_is_the_one_to_load, model_can_be_exported)
INITIAL_WEIGHTS, WARNINGS = (load,), (warnings,)
