#!/usr/bin/env bash
# grain 0.2.18: a transformation that changes nothing, put between `seed` and `shuffle`, gives another order.
#
# Question: MapDataset.range(10).seed(3)X.shuffle(): for which X is the order another one than without X?
# Expected: for random_map alone, if any, for it draws numbers. Measured: for every X: an identity map, a filter that
# keeps all, slice(0, 10), repeat(1), concatenate and mix of this one dataset. All of them give the *same* other order,
# and two maps a third one: the seed of a shuffle is drawn by its depth below `seed`. A map before `seed`, or
# shuffle(seed=3), changes nothing. Editing the preparation of data between two runs so changes the order of samples.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/order.py" <<'PYTHON'
import sys
from importlib.metadata import version

from grain import MapDataset


def same(value):
    return value


def order(dataset):
    return [int(value) for value in dataset.shuffle()]


def start():
    return MapDataset.range(10).seed(3)


between = {
    "map": start().map(same),
    "filter": start().filter(lambda value: True),
    "slice": start().slice(slice(0, 10)),
    "repeat": start().repeat(1),
    "random_map": start().random_map(lambda value, generator: value),
    "concatenate": MapDataset.concatenate([start()]),
    "mix": MapDataset.mix([start()], [1.0]),
}
plain, orders = order(start()), {name: order(dataset) for name, dataset in between.items()}
twice = order(start().map(same).map(same))
print(version("grain"), "plain", plain, "two maps", twice)
for name, found in orders.items():
    print(name, found)
alike = len({tuple(found) for found in orders.values()}) == 1
kept = order(MapDataset.range(10).map(same).seed(3)) == plain
explicit = list(MapDataset.range(10).map(same).shuffle(seed=3)) == list(MapDataset.range(10).shuffle(seed=3))
distinct = len({tuple(plain), tuple(orders["map"]), tuple(twice)}) == 3
sys.exit(not (alike and kept and explicit and distinct))
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q grain==0.2.18 numpy==2.5.5
"$folder/venv/bin/python" "$folder/order.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29, the second order seven times:
#   0.2.18 plain [4, 6, 9, 7, 5, 3, 1, 8, 2, 0] two maps [1, 0, 9, 2, 4, 7, 5, 8, 3, 6]
#   map [0, 6, 2, 4, 3, 1, 5, 7, 9, 8]
