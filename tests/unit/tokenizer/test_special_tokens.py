"""The special tokens of a Hugging Face folder are those of transformers' AutoTokenizer, whichever file names them."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tokenizer.from_flags import build_tokenizer
from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer

HF = Path(__file__).parents[2] / "golden" / "preprocess" / "hf_bpe"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token")
# The first is an added token of tokenizer.json, the next three are entries of its vocabulary alone.
TEXTS = ["<|endoftext|>", "the", "he", "ing", "<tool>", "<extra_0>", "<extra_1>", "[PAD]", "word", "<img>", "  ", "é<"]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Drawn:
    """A folder that names tokens in any of its files."""

    def __init__(self, folder: Path, seed: int):
        self._chooser = chooser = random.Random(seed)
        shutil.copytree(HF, folder)
        model = json.loads((folder / "tokenizer.json").read_text())
        for number, text in enumerate(self._some(4), len(model["model"]["vocab"])):
            if text not in model["model"]["vocab"] and chooser.random() < 0.5:
                model["added_tokens"].append({"id": number, **self._token(text)})
        for number, one in enumerate(model["added_tokens"][1:], len(model["model"]["vocab"])):
            one["id"] = number
        model["normalizer"] = chooser.choice((None, None, {"type": "NFC"}, {"type": "Lowercase"}))
        (folder / "tokenizer.json").write_text(json.dumps(model))
        settings: dict[str, Any] = {"eos_token": chooser.choice(TEXTS)}
        settings |= {name: self._either(chooser.choice(TEXTS), mark=True) for name in self._some(3, NAMED)}
        settings["tokenizer_class"] = chooser.choice(("PreTrainedTokenizerFast", "TokenizersBackend", "Unknown"))
        settings |= self._extras(mark=True)
        if chooser.random() < 0.4:
            base, texts = len(model["model"]["vocab"]) - 1, self._some(5)
            settings["added_tokens_decoder"] = {str(base + n): self._token(text) for n, text in enumerate(texts)}
        if chooser.random() < 0.3:
            settings["split_special_tokens"] = True
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if chooser.random() < 0.6:
            older = {name: self._either(chooser.choice(TEXTS), mark=False) for name in self._some(3, NAMED)}
            (folder / "special_tokens_map.json").write_text(json.dumps(older | self._extras(mark=False)))
        if chooser.random() < 0.5:
            added = {text: len(model["model"]["vocab"]) + n for n, text in enumerate(self._some(3))}
            (folder / "added_tokens.json").write_text(json.dumps(added))

    def texts(self, count: int) -> list[str]:
        """Texts that hold every token, in every case, after and before all sorts of characters."""
        between = ["", " ", "  ", "x", "\n", "The end.", "é", "e\u0301"]
        texts = []
        for _ in range(count):
            tokens = self._chooser.sample(TEXTS, len(TEXTS))
            tokens = [token.upper() if self._chooser.random() < 0.1 else token for token in tokens]
            texts.append("".join(f"{self._chooser.choice(between)}{token}" for token in tokens))
        return texts

    def _some(self, most: int, of: Any = TEXTS) -> list[str]:
        return self._chooser.sample(of, self._chooser.randint(0, most))

    def _token(self, text: str) -> dict[str, Any]:
        return {"content": text, **{flag: self._chooser.random() < 0.3 for flag in FLAGS}}

    def _either(self, text: str, mark: bool) -> Any:
        if self._chooser.random() < 0.6:
            return text
        token = self._token(text) | ({"__type": "AddedToken"} if mark else {})
        left_out = {flag for flag in FLAGS if self._chooser.random() < 0.2} | (set() if mark else {"special"})
        return {name: value for name, value in token.items() if name not in left_out}

    def _extras(self, mark: bool) -> dict[str, Any]:
        name = self._chooser.choice(("additional_special_tokens", "extra_special_tokens"))
        texts, kind = self._some(4), self._chooser.random()
        if kind < 0.4:
            return {}
        if kind < 0.5:
            return {"extra_special_tokens": {f"own_{n}_token": text for n, text in enumerate(texts)}}
        if not mark and name == "additional_special_tokens":
            return {name: texts}
        return {name: [self._either(text, mark) for text in texts]}


@pytest.mark.parametrize("seed", range(6))
def test_ids_are_those_of_transformers(tmp_path: Path, seed: int):
    from transformers import AutoTokenizer

    for number in range(10):
        drawn = Drawn(folder := tmp_path / str(number), 100 * seed + number)
        theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ours = build_tokenizer("HuggingFaceTokenizer", str(folder))
        assert isinstance(ours, HuggingFaceTokenizer)
        assert ours.vocab_size == len(theirs)
        assert (ours.eod, ours.bos) == (theirs.eos_token_id, theirs.bos_token_id)
        for text in drawn.texts(20):
            assert ours.encode(text) == theirs(text).input_ids, (number, text)
