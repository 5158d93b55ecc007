"""Special tokens of a Hugging Face folder, as transformers 5.23 reads them next to tokenizer.json.

Three files name tokens: tokenizer_config.json, and where that has no `added_tokens_decoder` also the older
special_tokens_map.json and added_tokens.json. transformers adds each token that tokenizer.json does not list among its
`added_tokens`, even one that its vocabulary has: only then is it found in a text. They are added in this order, which
decides the ids of new ones: added_tokens_decoder or added_tokens.json by id, `bos_token` and the other named ones, any
other `..._token`, then `extra_special_tokens` (formerly `additional_special_tokens`).
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _FORMERLY = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Token = str | AddedToken


class SpecialTokens:
    """Special tokens that the files of a tokenizer folder declare.

    Args:
        settings: content of tokenizer_config.json.
        known: the `added_tokens` of tokenizer.json, by id.
        special_map: content of special_tokens_map.json; empty where it is missing.
        added: content of added_tokens.json, text -> id; empty where it is missing.

    Raises:
        TypeError, KeyError, ValueError, AttributeError: an entry is no token.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        known: Mapping[int, AddedToken],
        special_map: Mapping[str, Any],
        added: Mapping[str, int],
    ):
        values = dict(settings)
        if _FORMERLY in values and not values.get(_EXTRA):
            values[_EXTRA] = values.pop(_FORMERLY)
        others = {name: values.pop(name) for name in settings if _is_other(name, values.get(name))}
        others |= _named_extras(values)
        if "added_tokens_decoder" in values:
            self._numbered = {int(number): _token(token) for number, token in values["added_tokens_decoder"].items()}
        else:
            for name, value in special_map.items():
                values[name] = _of_map(name, value, values)
            others |= _named_extras(values)
            special = {str(values[name]) for name in NAMED if values.get(name)}
            special |= {str(token) for token in values.get(_EXTRA) or ()}
            self._numbered = {number: _older(text, text in special) for text, number in added.items()} | dict(known)
        by_text = {str(token): token for token in self._numbered.values()}
        if _FORMERLY in values and _EXTRA not in values:
            values[_EXTRA] = values.pop(_FORMERLY)
        self._named: dict[str, Token] = {}
        for name in NAMED:
            if (value := values.get(name)) is not None:
                token = _token(value)
                self._named[name] = by_text.get(str(token), token)
        more = {
            name: _token(value) for name, value in values.items() if _is_other(name, value) or _is_marked(name, value)
        }
        self._named |= more | {name: _token(value) for name, value in others.items()}
        self._extra = [_token(value) for value in values.get(_EXTRA) or ()]

    def texts(self) -> dict[str, str]:
        """Return the texts of all named tokens, which a chat template may name."""
        return {name: str(token) for name, token in self._named.items()}

    def missing(self, known: Mapping[int, AddedToken]) -> list[AddedToken]:
        """Return the tokens to be added to a tokenizer that has the added tokens `known`, in their order."""
        tokens: list[Token] = [token for _, token in sorted(self._numbered.items())]
        listed = {token.content for token in known.values()} | {str(token) for token in tokens}
        for token in (*self._named.values(), *self._extra):
            if str(token) not in listed and token not in tokens:  # the last of the same text decides how it is found
                tokens.append(token)
        named = {str(token) for token in self._named.values()}
        return [_special(token) if isinstance(token, str) or str(token) in named else token for token in tokens]


def _is_other(name: str, value: Any) -> bool:
    """Return whether this is a token of the model's own, such as `image_token`."""
    return name.endswith("_token") and name not in NAMED and isinstance(value, Token)


def _is_marked(name: str, value: Any) -> bool:
    """Return whether this is such a token, written as an object that says so."""
    marked = isinstance(value, dict) and value.get("__type") == "AddedToken"
    return marked and name.endswith("_token") and name not in NAMED


def _named_extras(values: dict[str, Any]) -> dict[str, Any]:
    """Take `extra_special_tokens` out where it gives names to tokens."""
    return values.pop(_EXTRA) if isinstance(values.get(_EXTRA), dict) else {}


def _of_map(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    """Return an entry of special_tokens_map.json, whose objects are special tokens."""
    if name == _EXTRA and isinstance(value, list):
        return [*(values.get(_EXTRA) or ()), *(_special_one(token) for token in value)]
    return value if name == _EXTRA else _special_one(value)


def _special_one(value: Any) -> Any:
    return _token(value | {"special": True}) if isinstance(value, dict) else value


def _older(text: str, special: bool) -> AddedToken:
    return AddedToken(text, normalized=not special, special=special)


def _token(value: Any) -> Token:
    """Return a token, which the files give as a string or as an object."""
    if isinstance(value, dict):
        return AddedToken(value["content"], **{flag: value[flag] for flag in _FLAGS if flag in value})
    if not isinstance(value, Token):
        raise TypeError(f"{value!r} is no token")
    return value


def _special(token: Token) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    token.special = True
    return token
