#!/usr/bin/env bash
# gigatoken 0.10.0 takes 4,644 code points for letters that tokenizers 0.23.3 and tiktoken 0.14.0 do not.
#
# Question: with GPT-2's split and one vocabulary, how many code points c make "cb" other ids in tokenizers than in
# tiktoken, and in gigatoken than in tiktoken? (A merge of the last byte of c with "b" happens where c is a letter.)
# Guessed before measuring: 5,000 (Oniguruma's table of letters is older than that of Rust's regex), and none. Measured:
# none, and 4,644, from U+088F to U+33479: gigatoken's table is of a newer Unicode. A corpus that holds scripts of the
# last release gets other ids by the fast encoder than by the one that serves the model.
# Two readers, asked blindly: 9,263 and none; none and about 4,700, which is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/letters.py" <<'PYTHON'
import sys
from importlib.metadata import version

import gigatoken
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ranks = {bytes([value]): value for value in range(256)}
ranks |= {bytes([value, ord("b")]): 128 + value for value in range(128, 256)}

# The printable stand-ins of bytes: printable Latin-1 stands for itself, the others follow from U+0100.
plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = [value for value in range(256) if value not in plain]
stands = {value: chr(value) for value in plain} | {value: chr(256 + place) for place, value in enumerate(others)}
vocabulary = {"".join(stands[value] for value in piece): rank for piece, rank in ranks.items()}
merges = [(stands[value], "b") for value in range(128, 256)]

by_tokenizers = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
by_tokenizers.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
by_gigatoken = gigatoken.Tokenizer.from_json(by_tokenizers.to_str())
by_tiktoken = tiktoken.Encoding("gpt2 split", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={})

points = [point for point in range(128, 0x110000) if not 0xD800 <= point < 0xE000]
texts = [chr(point) + "b" for point in points]
reference = by_tiktoken.encode_ordinary_batch(texts)
first = []
for start in range(0, len(texts), 50_000):
    first += [encoding.ids for encoding in by_tokenizers.encode_batch(texts[start : start + 50_000])]
second = [list(ids) for ids in by_gigatoken.encode_batch_list(texts)]
differ = [[point for point, one, two in zip(points, reference, ids) if one != two] for ids in (first, second)]
print(*(f"{name} {version(name)}" for name in ("tokenizers", "tiktoken", "gigatoken")))
print("tokenizers:", len(differ[0]), "gigatoken:", len(differ[1]), *(f"U+{differ[1][place]:04X}" for place in (0, -1)))
sys.exit((len(differ[0]), len(differ[1]), differ[1][0], differ[1][-1]) != (0, 4644, 0x88F, 0x33479))
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q gigatoken==0.10.0 tokenizers==0.23.3 tiktoken==0.14.0 huggingface_hub==2.4.0
"$folder/venv/bin/python" "$folder/letters.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29:
#   tokenizers 0.23.3 tiktoken 0.14.0 gigatoken 0.10.0
#   tokenizers: 0 gigatoken: 4644 U+088F U+33479
