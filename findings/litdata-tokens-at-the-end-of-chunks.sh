#!/usr/bin/env bash
# litdata 0.2.76: TokensLoader drops what is left of every chunk, up to all tokens of a small one.
#
# Question: ten texts of 10 tokens, 0 to 99, are written by `optimize` and read in blocks by StreamingDataset. Which
# tokens never come, for chunk_size 20 and blocks of 8, for 30 and 16, and for one chunk of all and blocks of 16?
# Expected: the last 100 % block tokens of the whole: 96 to 99 each time. Measured: 16 to 19, 36 to 39
# and so on to 99 (20 of 100); 52 of 100; 96 to 99. Blocks do not go over the edge of a chunk, a chunk ends with a
# whole text, and the last chunk of 10 tokens holds no block of 16. A chunk should hold thousands of blocks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/blocks.py" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from litdata import StreamingDataset, TokensLoader, optimize


def text(number):
    yield torch.arange(10 * number, 10 * number + 10, dtype=torch.int32)


if __name__ == "__main__":
    wrong = 0
    for chunk, block, missing in ((20, 8, 20), (30, 8, 20), (30, 16, 52), (20, 10, 0), (100, 16, 4)):
        folder = f"{sys.argv[1]}/{chunk}-{block}"
        loader = TokensLoader(block_size=block)
        optimize(text, list(range(10)), folder, chunk_size=chunk, num_workers=1, item_loader=loader)
        dataset = StreamingDataset(folder, item_loader=TokensLoader(block_size=block))
        seen = [token for place in range(len(dataset)) for token in dataset[place].tolist()]
        lost = sorted(set(range(100)) - set(seen))
        print(version("litdata"), "chunk", chunk, "block", block, "blocks", len(dataset), "lost", len(lost), lost[:5])
        wrong += len(lost) != missing or len(seen) != 100 - missing
    sys.exit(wrong)
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q litdata==0.2.76 torch==2.15.0 numpy==2.5.5
mkdir "$folder/data"
"$folder/venv/bin/python" "$folder/blocks.py" "$folder/data" > "$folder/output" 2> "$folder/errors" || {
    cat "$folder/output" "$folder/errors"
    exit 1
}
grep lost "$folder/output"
# Output seen on 2026-11-29:
#   0.2.76 chunk 20 block 8 blocks 10 lost 20 [16, 17, 18, 19, 36]
#   0.2.76 chunk 30 block 8 blocks 10 lost 20 [24, 25, 26, 27, 28]
#   0.2.76 chunk 30 block 16 blocks 3 lost 52 [16, 17, 18, 19, 20]
#   0.2.76 chunk 20 block 10 blocks 10 lost 0 []
#   0.2.76 chunk 100 block 16 blocks 6 lost 4 [96, 97, 98, 99]
