#!/usr/bin/env bash
# datasets 5.2.0: interleave_datasets takes more rows of stored datasets than of the same ones as iterables.
#
# Question: interleave_datasets without probabilities mixes datasets of the sizes below, once stored and once by
# to_iterable_dataset(). How many rows come, where the first is exhausted, and where all are?
# Guessed before measuring: for (10, 10, 10), first exhausted: 30 and 30; all exhausted: 30 and 28; (3, 10, 10), all: 30
# and 29; (2, 3), all: 6 and 6. Measured: stored datasets always yield whole rounds. Iterables stop with the row that
# exhausts the dataset: with "first_exhausted" one position after the other is missing where the *shortest* stands
# early, with "all_exhausted" where the *longest* stands early. The order of the datasets decides, up to count - 1 rows.
# Two readers, asked blindly: one had every number right, the other 28 rows for (3, 10, 10) and 5 for (2, 3).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/mix.py" <<'PYTHON'
import sys

from datasets import Dataset, __version__, interleave_datasets

EXPECTED = {
    (10, 10, 10): [(30, 28), (30, 30)],
    (3, 10, 10): [(9, 7), (30, 30)],
    (10, 3, 10): [(9, 8), (30, 30)],
    (10, 10, 3): [(9, 9), (30, 29)],
    (2, 3): [(4, 3), (6, 6)],
    (6, 5, 4): [(12, 12), (18, 16)],
    (5, 1, 1, 1): [(4, 2), (20, 17)],
}
wrong = 0
for sizes, expected in EXPECTED.items():
    stored = [Dataset.from_dict({"row": list(range(size))}) for size in sizes]
    iterables = [dataset.to_iterable_dataset() for dataset in stored]
    found = []
    for strategy in ("first_exhausted", "all_exhausted"):
        of_stored = interleave_datasets(stored, stopping_strategy=strategy)["row"]
        of_iterables = [row["row"] for row in interleave_datasets(iterables, stopping_strategy=strategy)]
        found.append((len(of_stored), len(of_iterables)))
        wrong += list(of_stored)[: len(of_iterables)] != of_iterables
    print(__version__, sizes, *found)
    wrong += found != expected
sys.exit(wrong)
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1 huggingface_hub==2.4.0 numpy==2.5.5
export HF_HOME="$folder/cache"
"$folder/venv/bin/python" "$folder/mix.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29 (sizes, rows of stored and of iterables until the first is exhausted, until all are):
#   5.2.0 (10, 10, 10) (30, 28) (30, 30)
#   5.2.0 (3, 10, 10) (9, 7) (30, 30)
#   5.2.0 (10, 3, 10) (9, 8) (30, 30)
#   5.2.0 (10, 10, 3) (9, 9) (30, 29)
#   5.2.0 (2, 3) (4, 3) (6, 6)
#   5.2.0 (6, 5, 4) (12, 12) (18, 16)
#   5.2.0 (5, 1, 1, 1) (4, 2) (20, 17)
