"""Reads checkpoints that Megatron-LM wrote (0.19, torch_dist) as ours.

Its tensors have our names and cuts, but for two: a layer's norms lie under the matrix that they precede (as Transformer
Engine fuses them; since 0.19 also without it), and the fp32 copies of 16-bit weights under `fp32_param` where the
optimizer is not distributed. What is no tensor is laid out in another way: its flags are an argparse.Namespace
(`args`), the position on the curves is the scheduler's. Its random generators cannot become ours.
"""

from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase

from megatron_ext.checkpoint.native.snapshot import Saveable
from megatron_ext.config.parse.options import flag_of, names_by_resume
from megatron_ext.config.parse.saved import model_names
from megatron_ext.config.resolve import padded_vocabulary
from megatron_ext.config.schema import Config
from megatron_ext.errors import DataError
from megatron_ext.optim.loss_scale import of_the_mean
from megatron_ext.plugins.migrate.megatron_lm_checkpoint.saved_flags import model_flags

_OTHER_NAMES = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj.layer_norm_"),
    ("optimizer.state.param.", "optimizer.state.fp32_param."),
)
# Whole tensors by the names of the weights; the others are flat buffers that belong to one layout.
_READABLE = "fully_reshardable"


def wrote(common: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint with this common state is Megatron-LM's."""
    return isinstance(common.get("args"), Namespace)


def different_flags(common: Mapping[str, Any], config: Config) -> list[str]:
    """Return the flags of the model that the checkpoint was trained with otherwise."""
    args = vars(common["args"])
    was = model_flags(args)
    ours = vars(config.model)
    without_effect = {"vocab_size"}  # its tokenizer may have more; the padded size tells
    if not ours["group_query_attention"] and not was.get("group_query_attention"):
        without_effect |= {"num_query_groups"}
    if not ours["disable_bias_linear"] and not was["disable_bias_linear"]:
        without_effect |= {"add_qkv_bias"}
    if not ours["use_rope_scaling"] and not was.get("use_rope_scaling"):
        without_effect |= {name for name in ours if name.startswith("rope_scaling")}
    names = [name for name in model_names(was, finetune=config.checkpoint.finetune) if name not in without_effect]
    flags = [
        f"{flag_of(name)} {was[name]} (given: {ours[name]})"
        for name in names
        if _is_given(name, was, args) and was[name] != ours[name]
    ]
    if args.get("apply_layernorm_1p"):
        flags.append("--apply-layernorm-1p True (here a norm's weights are kept as they multiply, and not less one)")
    padded = was.get("padded_vocab_size")
    entries = config.data.vocab_size
    if padded is not None and entries is not None:
        divisor, ranks = args.get("make_vocab_size_divisible_by", 128), args.get("tensor_model_parallel_size", 1)
        if padded_vocabulary(entries, divisor, ranks) != padded:
            flags.append(f"a vocabulary that is padded to {padded} entries (given: --vocab-size {entries})")
    return flags


def _is_given(name: str, was: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
    """Return whether the run that saved had a value for a field of the model; to have none is one where it computes."""
    return was.get(name) is not None or (name in args and name in names_by_resume("function"))


def optimizer_is_readable(common: Mapping[str, Any]) -> bool:
    """Return whether its optimizer state, where there is any, does not belong to one layout alone."""
    return all(kind == _READABLE for kind in _values(common.get("optimizer"), ("param_state_sharding_type",)))


def as_ours(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common state in our terms, without the optimizer's where there is none."""
    args, scheduler = common["args"], common.get("opt_param_scheduler", {})
    consumed = getattr(args, "consumed_train_samples", 0)
    state = {
        "iteration": common["iteration"],
        "consumed_samples": consumed,
        "consumed_tokens": consumed * args.seq_length,
        "scheduled_samples": scheduler.get("num_steps", consumed),
    }
    translated: dict[str, Any] = {"iteration": common["iteration"], "train_state": state}
    if "optimizer" in common:
        updates = [int(step) for step in _values(common["optimizer"], ("common_step", "step"))]
        scaler = next(_values(common["optimizer"], ("grad_scaler",)), None) or {}
        translated["optimizer_step"] = max(updates, default=0)
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in scaler.items()}
        # With --calculate-per-token-loss it scales the sum over the tokens, as earlier versions of this program did.
        translated["grad_scaler"] = plain if getattr(args, "calculate_per_token_loss", False) else of_the_mean(plain)
    return translated


def saved_name(name: str, saved: Collection[str]) -> str:
    """Return the name that the checkpoint has one of our tensors under; where it has none, ours."""
    names = [name]
    for ours, theirs in _OTHER_NAMES:
        names += [name.replace(ours, theirs) for name in names]
    return next((name for name in names if name in saved), name)


def rename(state_dict: dict[str, Any], saved: Collection[str]) -> dict[str, list[str]]:
    """Give the tensors to be read the names that the checkpoint has them under, in place.

    Returns:
        By chunk of the model: the extra states of modules, which only Transformer Engine's have, and which are taken
        out, for they may hold any object.
    """

    def renamed(value: Any) -> Any:
        if isinstance(value, ShardedBase):
            value.key = saved_name(value.key, saved)
        return value

    dict_list_map_inplace(renamed, state_dict)
    extra_states: dict[str, list[str]] = {}
    for key, part in state_dict.items():
        if key.startswith("model"):
            extra_states[key] = [name for name in part if name.endswith("._extra_state")]
            for name in extra_states[key]:
                del part[name]
    return extra_states


def _values(content: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Yield the values under these names, at any depth."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            if name in names:
                yield value
            else:
                yield from _values(value, names)
    elif isinstance(content, list):
        for value in content:
            yield from _values(value, names)


class MegatronLM:
    """Checkpoints of Megatron-LM (`checkpoint.native.other_formats.OtherFormat`)."""

    wrote = staticmethod(wrote)
    rename = staticmethod(rename)
    saved_name = staticmethod(saved_name)

    @staticmethod
    def as_ours(run: Saveable, path: Path, common: Mapping[str, Any]) -> dict[str, Any]:
        """Return the common state in our terms.

        Raises:
            DataError: the model was trained with other flags, or its optimizer's state belongs to one layout.
        """
        different = different_flags(common, run.config)
        if different:
            raise DataError(
                f"the checkpoint {path}, which Megatron-LM wrote, has {', '.join(different)}; give the flags that it "
                "was trained with."
            )
        flags = run.config.checkpoint
        if not (flags.finetune or flags.no_load_optim or optimizer_is_readable(common)):
            raise DataError(
                f"the checkpoint {path}, which Megatron-LM wrote, has its optimizer state in flat buffers that only "
                "its own layout can read; save it there with --dist-ckpt-optim-fully-reshardable, or add "
                "--no-load-optim to go on with a new optimizer."
            )
        return as_ours(common)


FORMATS = (MegatronLM(),)
