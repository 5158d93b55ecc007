"""Says, before a corpus is encoded, where transformers' AutoTokenizer reads a tokenizer's folder otherwise than we do.

We take tokenizer.json as it is. AutoTokenizer takes the class that tokenizer_config.json names; some of them
(GPT2Tokenizer, Qwen2Tokenizer) keep only vocabulary and merges and build their own normalizer and split around them.
Whoever trains with one and serves with the other would see other ids.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from megatron_ext.tokenizer.probe_texts import probe_texts
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer
from megatron_ext.untrusted.text import load_json

_AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")

# A process of its own: transformers imports torch, which this one must not have when it forks. No code of the folder
# is run.
_THEIR_IDS = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
json.dump([tokenizer(text).input_ids for text in json.load(sys.stdin)], sys.stdout)
"""


def read_otherwise(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a sentence with the remedy where AutoTokenizer gives other ids for the tokenizer's folder, or fails on it.

    Nothing is compared where tokenizer_config.json names no class or one that reads tokenizer.json as it is, or where
    transformers is not installed.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not importlib.util.find_spec("transformers"):
        return
    named = tokenizer.settings.get("tokenizer_class")
    if named is None or named in _AS_IT_IS:
        return
    ours = HuggingFaceTokenizer(tokenizer.folder)  # without --tokenizer-special-tokens
    texts = probe_texts(ours)
    child = subprocess.run(
        [sys.executable, "-P", "-c", _THEIR_IDS, os.path.abspath(tokenizer.folder)],
        input=json.dumps(texts), capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )  # fmt: skip
    remedy = f'"tokenizer_class": "{_AS_IT_IS[0]}" in its tokenizer_config.json lets both read tokenizer.json as it is'
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["no word"])[-1]
        yield f"transformers' AutoTokenizer cannot read it ({named}: {reason[:300]}); {remedy}"
        return
    pairs = zip(texts, load_json(child.stdout.encode()), strict=True)
    if wrong := [text for text, theirs in pairs if ours.encode(text) != theirs]:
        yield (
            f"transformers' AutoTokenizer rebuilds the tokenizer as {named} and gives other ids than tokenizer.json, "
            f"whose ids are written, on {len(wrong)} of {len(texts)} texts, of which the shortest is "
            f"{min(wrong, key=len)!r:.200}. {remedy}; set it before data are made, because the file is part of the "
            "tokenizer's identity"
        )
