#!/usr/bin/env bash
# tokenizers 0.23.3 normalizes 171 code points otherwise by NFKC than sentencepiece 0.2.3, whose table is the newer one.
#
# Question: how many single code points does NFKC of tokenizers, and `nfkc` of sentencepiece, turn into something else
# than Python 3.12 (Unicode 15.0) does? How many do the two treat differently?
# Guessed before measuring: tokenizers 100, sentencepiece 500, for its table is of 2017 or so. Measured: 134 and 37, and
# 171 between them: sentencepiece knows what Unicode has added since Python's table, tokenizers leaves out what came
# since 2019, such as U+32FF, the name of the Japanese era. A tokenizer that was trained by one and is served by
# the other sees other text there.
# Two readers, asked blindly: 132, 134 and 2; 121, 180 and 60.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/differ.py" <<'PYTHON'
import sys
import unicodedata
from importlib.metadata import version

from sentencepiece import SentencePieceNormalizer
from tokenizers.normalizers import NFKC

plain = {"escape_whitespaces": False, "remove_extra_whitespaces": False, "add_dummy_prefix": False}
by_sentencepiece = SentencePieceNormalizer(rule_name="nfkc", **plain)
by_tokenizers = NFKC()
points = [chr(point) for point in range(1, 0x110000) if not 0xD800 <= point < 0xE000]
of_python = [unicodedata.normalize("NFKC", point) for point in points]
of_sentencepiece = [by_sentencepiece.normalize(point) for point in points]
of_tokenizers = [by_tokenizers.normalize_str(point) for point in points]


def differing(one, other):
    return [point for point, first, second in zip(points, one, other) if first != second]


apart = differing(of_sentencepiece, of_tokenizers)
counts = [len(differing(of_python, other)) for other in (of_tokenizers, of_sentencepiece)] + [len(apart)]
era = [by_sentencepiece.normalize("\u32ff"), by_tokenizers.normalize_str("\u32ff")]
names = [f"{name} {version(name)}" for name in ("tokenizers", "sentencepiece")]
lengths = [len(text) for text in era]
print(*names, unicodedata.unidata_version, "differ", *counts, "U+32FF becomes", *lengths, "characters")
sys.exit(counts[2] != 171 or era != ["\u4ee4\u548c", "\u32ff"])
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3 sentencepiece==0.2.3 huggingface_hub==2.4.0
"$folder/venv/bin/python" "$folder/differ.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29:
#   tokenizers 0.23.3 sentencepiece 0.2.3 15.0.0 differ 134 37 171 U+32FF becomes 2 1 characters
