#!/usr/bin/env bash
# transformers 5.23.0 (huggingface_hub 2.4.0) reads no MPT folder whose attention dropout is a fraction.
#
# The documentation of MptAttentionConfig calls attn_pdrop a float, and transformers 4.56.2 reads 0.1 and keeps it. Since
# configurations are checked data classes, the field is declared `int`: 0.1 raises, and so does 0.0; only the whole
# number 0 is read. The exception takes two arguments and hands one to its base, so a process pool whose worker raised
# it cannot read it back: the pool reports that the worker was terminated abruptly, and the message is lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/read.py" <<'PYTHON'
import pickle
import sys

from transformers import MptConfig, __version__

found = []
for rate in (0, 0.0, 0.1):
    try:
        found.append(str(MptConfig(attn_config={"attn_pdrop": rate}).attn_config.attn_pdrop))
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
            kept = "restored"
        except TypeError:
            kept = "not restored by pickle"
        found.append(f"{type(error).__name__}, {kept}")
print(__version__, *found, sep=" | ")
expected = ["0", "0.0", "0.1"]
if __version__ == "5.23.0":
    refused = "StrictDataclassFieldValidationError, not restored by pickle"
    expected = ["0", refused, refused]
sys.exit(found != expected)
PYTHON
for pins in "transformers==4.56.2" "transformers==5.23.0 huggingface_hub==2.4.0"; do
    python3.12 -m venv "$folder/venv"
    read -ra packages <<< "$pins"
    "$folder/venv/bin/pip" install -q "${packages[@]}"
    "$folder/venv/bin/python" "$folder/read.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
    rm -rf "$folder/venv"
done
# Output seen on 2026-11-28:
#   4.56.2 | 0 | 0.0 | 0.1
#   5.23.0 | 0 | StrictDataclassFieldValidationError, not restored by pickle | (the same)
