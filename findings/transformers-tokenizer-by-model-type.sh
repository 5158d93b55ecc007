#!/usr/bin/env bash
# transformers 5.23.0 (tokenizers 0.23.3): a config.json of type qwen2 overrules the tokenizer_class of tokenizer_config.json.
#
# Question: a folder holds a byte-level tokenizer.json with a split of its own, a tokenizer_config.json that says
# "tokenizer_class": "PreTrainedTokenizerFast", and a config.json that says only {"model_type": M}. For which M do the
# ids of AutoTokenizer differ from those of tokenizers?
# Guessed before measuring: for none, whatever M is; only classes named by tokenizer_class rebuild (LlamaTokenizer,
# GemmaTokenizer). Measured: qwen2, qwen3_5 and qwen4_exp take a class that keeps vocabulary and merges and builds a
# split of its own; llama, mistral, gpt2, qwen3, gpt_neox, gemma and deepseek_v3 read tokenizer.json as it is.
# Two readers, asked blindly: qwen3_5 and qwen4_exp; qwen2, qwen3 and qwen3_5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/read.py" <<'PYTHON'
import json
import sys
import tempfile
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, __version__

text = "The quick brown fox 12345  x\n\nhello"
tokenizer = Tokenizer(models.BPE())
own_split = pre_tokenizers.Split(Regex(r"\p{N}|[^\s\p{N}]+|\s+"), "isolated")
byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([own_split, byte_level])
tokenizer.decoder = decoders.ByteLevel()
corpus = ["The quick brown fox jumps over 12345 lazy dogs; foo_bar(1) == 2\n\n  x  y"] * 50 + ["hello world 2026"] * 50
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(
    corpus, trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
)
ids = tokenizer.encode(text).ids
folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
tokenizer.save(str(folder / "tokenizer.json"))
settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
(folder / "tokenizer_config.json").write_text(json.dumps(settings))
same, other = [], []
kinds = "llama mistral gpt2 qwen3 gpt_neox gemma deepseek_v3 qwen2 qwen3_5 qwen4_exp".split()
for kind in kinds:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    read = AutoTokenizer.from_pretrained(folder)
    found = read(text, add_special_tokens=False)["input_ids"]
    (same if found == ids else other).append(f"{kind}:{type(read).__name__}")
print(__version__, "same:", *same)
print(__version__, "other:", *other)
expected = ["qwen2:Qwen2Tokenizer", "qwen3_5:Qwen3_5Tokenizer", "qwen4_exp:Qwen3_5Tokenizer"]
sys.exit(other != expected or len(same) != 7)
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3 huggingface_hub==2.4.0
"$folder/venv/bin/python" "$folder/read.py" "$folder" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29:
#   5.23.0 same: llama mistral gpt2 qwen3 gpt_neox gemma deepseek_v3 (each by TokenizersBackend)
#   5.23.0 other: qwen2:Qwen2Tokenizer qwen3_5:Qwen3_5Tokenizer qwen4_exp:Qwen3_5Tokenizer
