"""Begins the file of a type of Hugging Face model from transformers' class of it.

    megatron-ext new-family --type ministral --save megatron_ext/plugins/families/ministral.py

It makes a tiny model of the type, finds the family whose tensors are nearest to its tensors, and writes a file in which
the type is that family with the names and defaults of its class. Then it gives every key of the configuration another
value: the list that it prints says what transformers does with it, and whether the draft computes the same, refuses
the value, or is wrong. Nothing is downloaded.

Exit codes: 0 the draft computes every key as transformers does or refuses it, 1 something is not known, 64 transformers
makes no such model.
"""

import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from megatron_ext.commandline import ToolParser
from megatron_ext.errors import ConfigurationError
from megatron_ext.terminal import say
from megatron_ext.untrusted.text import load_json

_TOLERANCE = 1e-5


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Begin the file of a type of Hugging Face model.", __doc__)
    parser.add_argument("--type", required=True, metavar="X", help="model_type as in config.json")
    parser.add_argument("--save", type=Path, metavar="FILE", help="where to write the file; default: print it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a value (JSON) of the tiny model's config.json"
    )
    parser.add_argument("--but", action="append", default=[], metavar="TYPE", help="a family that is not begun from")
    options = parser.parse_args(argv)
    text, notes = begun(options.type, _settings(options.set), tuple(options.but))
    if options.save is None:
        say(text)
    else:
        options.save.write_text(text, encoding="utf-8")
        say(f"wrote {options.save}")
    for note in notes:
        say(note)
    return int(any(note.startswith(_UNKNOWN) for note in notes))


_UNKNOWN = "not known: "


def _settings(words: list[str]) -> dict[str, Any]:
    found = {}
    for word in words:
        key, _, value = word.partition("=")
        try:
            found[key] = load_json(value.encode())
        except ValueError:
            raise ConfigurationError(
                f"--set {word}: the value is no JSON; a text is written as key='\"text\"'"
            ) from None
    return found


def begun(kind: str, settings: dict[str, Any], but: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """Return the text of a file for a type, and what is known and not known of it, a line each.

    Args:
        kind: the type, as `config.json` names it.
        settings: values of keys of the tiny model's configuration.
        but: types of families that are not to be begun from.
    Raises:
        ConfigurationError: transformers makes no tiny model of the type with these settings.
    """
    from megatron_ext.plugins.huggingface.drafted_logits import drafted_logits
    from megatron_ext.plugins.huggingface.family_draft import nearest, text_of
    from megatron_ext.plugins.huggingface.tiny_models import TinyModels, defaults, tokens

    usual = defaults(kind)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart,
    ):

        def ours(text: str, written: list[Any]) -> list[Any]:
            folders = [str(one.folder) for one in written]
            return apart.submit(drafted_logits, text, folders, tokens().tolist()).result()

        models = TinyModels(kind, settings, Path(folder))
        effects = list(models.effects())
        idle = {one.key for one in effects} - {one.key for one in effects if one.written is not None}
        content, tensors = models.written_content(), models.tensors()
        drafts = nearest(kind, models.architecture, content, tensors, usual, idle, but)[:_COMPUTED]
        texts = [text_of(draft, usual) for draft in drafts]
        same = (number for number, text in enumerate(texts) if _agree(models.base, ours(text, [models.base])[0]))
        chosen = next(same, 0)
        draft, text = drafts[chosen], texts[chosen]
        shown = [("the tiny model", models.base)]
        shown += [(_said(one), one.written) for one in effects if one.written is not None]
        found = ours(text, [written for _, written in shown])
        notes = [f"nearest: {draft.base.model_type}, {draft.same} of {len(tensors)} tensors have a place"]
        notes += [f"{_UNKNOWN}{words}" for words in draft.unknown()]
        notes += [_said(one) for one in effects if one.written is None]
        notes += [_verdict(what, written, logits) for (what, written), logits in zip(shown, found, strict=True)]
        return text, notes


_COMPUTED = 6
"""Drafts whose logits are computed, until those of one are the model's."""


def _said(effect: Any) -> str:
    return f"{effect.key} {json.dumps(effect.value)[:60]}: {effect.words}"


def _agree(written: Any, ours: Any) -> bool:
    if isinstance(ours, str):
        return False
    return (ours - written.logits).abs().max().item() <= _TOLERANCE * max(1.0, written.logits.abs().max().item())


def _verdict(what: str, written: Any, ours: Any) -> str:
    if isinstance(ours, str):
        told = ours.replace(str(written.folder), "").replace("--load-hf /config.json: ", "").replace("\n", "; ")
        return f"{what}; refused: {told[:300]}"
    difference = (ours - written.logits).abs().max().item()
    if _agree(written, ours):
        return f"{what}; the draft computes the same, to {difference:.1e}"
    return f"{_UNKNOWN}{what}; the draft computes something else, {difference:.1e} off"
