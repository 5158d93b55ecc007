"""Makes tiny models of any decoder of transformers, and finds what each key of their configurations does to logits.

It imports transformers, and runs where `megatron_ext.device` is not installed (`transformers_reference.py` says why).
"""

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.reading import WITHOUT_BEARING
from megatron_ext.plugins.huggingface.transformers_reference import use_plain_torch
from megatron_ext.untrusted.text import load_json, read_file

VOCABULARY, LENGTH = 1003, 48
_SMALL: dict[str, int] = {
    r"vocab_size": VOCABULARY,
    r"(hidden_size|n_embd|d_model|n_embed|embed_dim)": 48,
    r"(shared_)?.*(expert|moe).*(intermediate|ffn).*": 32,
    r"(.*intermediate_size|n_inner|ffn_dim|ffn_hidden_size|mlp_hidden_size)": 80,
    r"(num_hidden_layers|n_layers?|num_layers)": 4,
    r"(num_attention_heads|n_heads?|num_heads)": 6,
    r"(num_key_value_heads|num_kv_heads)": 2,
    r"(head_dim|kv_channels)": 12,
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len)": 128,
    r"(num_experts|num_local_experts|n_routed_experts)": 6,
    r"(num_experts_per_tok|moe_topk|moe_k|experts_per_token)": 3,
    r"q_lora_rank": 20,
    r"kv_lora_rank": 24,
    r"qk_nope_head_dim": 12,
    r"qk_rope_head_dim": 8,
    r"v_head_dim": 16,
    r"(sliding_window|window_size)": 6,
    r"(n_group|topk_group|n_groups)": 1,
    r"(first_k_dense_replace|num_dense_layers)": 1,
    r"pad_token_id": 0,
}
"""Names of sizes -> sizes in which a swapped or mis-sliced tensor shows."""

SIZES = re.compile("|".join(_SMALL))
_KEPT = {key for keys in WITHOUT_BEARING.values() for key in keys} | {"vocab_size", "tie_word_embeddings"}
_LESS_THAN_ROUNDING = 1e-6


@dataclass(frozen=True)
class Written:
    """A model in a folder, and its logits of `tokens()`, [2, LENGTH, VOCABULARY]."""

    folder: Path
    logits: torch.Tensor


@dataclass(frozen=True)
class Effect:
    """Says what another value of a key does."""

    key: str
    value: Any
    words: str
    """What transformers does with it."""

    written: Written | None
    """The model with this value, where its logits or its shapes differ."""


def tokens() -> torch.Tensor:
    """Return the token ids of two texts, [2, LENGTH], from all over the vocabulary."""
    return torch.tensor([[(7919 * place + 101 * row) % VOCABULARY for place in range(LENGTH)] for row in range(2)])


def defaults(kind: str) -> dict[str, Any]:
    """Return the keys of the configuration of a type, with the values that its class takes for missing ones; without
    keys that follow from others, and with twice the usual width, so that no value is the usual one by chance.

    Raises:
        ConfigurationError: transformers is not installed or has no such type.
    """
    use_plain_torch()
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise ConfigurationError("transformers is not installed; pip install -r requirements.txt") from None
    if kind not in CONFIG_MAPPING:
        raise ConfigurationError(
            f"--type {kind} is no type of the installed transformers; it names types as config.json"
        )
    made = CONFIG_MAPPING[kind]
    usual = dict(made().to_dict())
    twice = {key: 2 * usual[key] for key in ("hidden_size", "n_embd", "d_model") if isinstance(usual.get(key), int)}
    # With another width: what follows from it is no default.
    moved = dict(made(**twice).to_dict())
    return twice | {key: value for key, value in usual.items() if key not in twice and moved.get(key) == value}


class TinyModels:
    """The tiny models of one type, all with the same weights where shapes agree."""

    def __init__(self, kind: str, settings: Mapping[str, Any], folder: Path):
        """Take the type, values of keys that the tiny model shall have, and a folder for the models.

        Raises:
            ConfigurationError: transformers cannot make or run the model.
        """
        from transformers import CONFIG_MAPPING, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.kind, self.folder = kind, folder
        self.content = {**_small(CONFIG_MAPPING[kind]().to_dict()), **settings}
        try:
            self.model = _model(kind, self.content)
            self.base = self._written(self.model, "base")
        except Exception as error:
            told = f"{type(error).__name__}: {str(error)[:300]}"
            raise ConfigurationError(
                f"--type {kind}: transformers makes no tiny model of it: {told}; name sizes that fit, such as "
                "--set num_attention_heads=4"
            ) from None

    @property
    def architecture(self) -> str:
        """The class that computes logits, as `config.json` names it; empty for a text model that has none."""
        return "" if isinstance(self.model, _TextWithHead) else type(self.model).__name__

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the tensors in the files of the tiny model."""
        return {name: tuple(one.shape) for name, one in load_file(self.base.folder / "model.safetensors").items()}

    def written_content(self) -> dict[str, Any]:
        """Return the `config.json` of the tiny model."""
        return dict(load_json(read_file(self.base.folder / "config.json", most=1 << 20)))

    def effects(self) -> Iterator[Effect]:
        """Yield, for each key that may have a bearing, what another value does."""
        for key, value in sorted(self.content.items()):
            if key in _KEPT or SIZES.fullmatch(key) or key.startswith("_"):
                continue
            for number, other in enumerate(_others(key, value)):
                yield self._effect(key, other, f"{key}-{number}")

    def _effect(self, key: str, value: Any, folder: str) -> Effect:
        try:
            model = _model(self.kind, {**self.content, key: value})
            state = self.model.state_dict()
            same = {name: one.shape for name, one in model.state_dict().items()} == {
                n: t.shape for n, t in state.items()
            }
            if same:
                model.load_state_dict(state)
            written = self._written(model, folder)
        except Exception as error:
            return Effect(key, value, f"transformers refuses it: {type(error).__name__}", None)
        difference = (written.logits - self.base.logits).abs().max().item()
        if same and difference < _LESS_THAN_ROUNDING:
            return Effect(key, value, "no effect", None)
        return Effect(key, value, f"logits differ by {difference:.1e}" if same else "other tensors", written)

    def _written(self, model: Any, name: str) -> Written:
        folder = self.folder / name
        model.save_pretrained(folder)
        with torch.no_grad():
            return Written(folder, model(input_ids=tokens(), use_cache=False).logits)


def _small(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with small sizes, and without lists of all layers of the usual model."""
    found = {}
    for key, value in content.items():
        if value is None or key in ("model_type", "transformers_version", "architectures", "dtype"):
            continue
        small = next((size for name, size in _SMALL.items() if re.fullmatch(name, key)), value)
        is_size = isinstance(value, int) and not isinstance(value, bool)
        found[key] = small if is_size and value else value
        if isinstance(value, list) and len(value) > 8:
            del found[key]
    return found


def _others(key: str, value: Any) -> Iterator[Any]:
    """Yield other values that a key might have."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1 if value < 2 else value * 2
    elif isinstance(value, float):
        yield value * 1.5 + 0.25 if value < 1 else value * 3
    elif isinstance(value, dict) and "rope_theta" in value:
        yield {**value, "rope_theta": value["rope_theta"] / 100}
        if value.get("rope_type", "default") == "default":
            yield {**value, "rope_type": "linear", "factor": 4.0}
    elif isinstance(value, list) and {*map(type, value)} <= {str, int, bool} and len({*value}) > 1:
        yield value[::-1]
    elif isinstance(value, str) and key in ("hidden_act", "hidden_activation", "activation_function"):
        yield from (one for one in ("gelu", "relu") if one != value)


def _model(kind: str, content: Mapping[str, Any]) -> Any:
    """Return transformers' model with logits, with random weights that no norm begins alike."""
    from transformers import CONFIG_MAPPING

    torch.manual_seed(1)
    model = model_with_logits(CONFIG_MAPPING[kind](**content))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.05))
    return model.eval()


def model_with_logits(config: Any) -> Any:
    """Return a model of transformers of a type: as `AutoModelForCausalLM` makes it, of another class of its own with
    logits, or its text model with an output layer."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    if config.model_type in known:
        return transformers.AutoModelForCausalLM.from_config(config)
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    if (own := getattr(transformers, f"{name}ForCausalLM", None)) is not None:
        return own(config)
    module = vars(importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_")))
    text = (one for one in module.values() if getattr(one, "config_class", None) is type(config))
    return _TextWithHead(next(one for one in text if one.__name__.endswith("TextModel"))(config))


class _TextWithHead(torch.nn.Module):
    """A text model of a model of text and images, with the output layer of the whole."""

    base_model_prefix = "model"

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.config = model, model.config
        self.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
        self.is_tied = getattr(model.config, "tie_word_embeddings", False)
        if self.is_tied:
            self.lm_head.weight = model.get_input_embeddings().weight

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        """Return an object with `logits`, [batch, sequence, vocabulary]."""
        hidden = self.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden))

    def save_pretrained(self, folder: Path) -> None:
        """Write the tensors and `config.json`."""
        self.model.save_pretrained(folder)
        state = {f"model.{name}": one for name, one in load_file(folder / "model.safetensors").items()}
        state |= {} if self.is_tied else {"lm_head.weight": self.lm_head.weight.detach()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
