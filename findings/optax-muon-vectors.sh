#!/usr/bin/env bash
# optax 0.2.8: under contrib.muon the first update of a bias is 1.474 rates, not one: `nesterov` reaches its Adam, too.
#
# Question: contrib.muon as it is gets a gradient of ones for a weight of shape (256,) and one of (4, 64, 256), which it
# leaves to Adam. How many rates long are the first three updates of each element?
# Guessed before measuring: Adam's with the same rate, so 1, 1, 1, as by torch and optax.adam. Measured: 1.474, 1.157,
# 1.078: muon's nesterov=True is handed on, and Adam with it adds the bias-corrected gradient of one step to the
# momentum of the next; with nesterov=False they are 1. A warmup that just holds by torch is half as steep again here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/steps.py" <<'PYTHON'
import sys

import jax.numpy as jnp
import optax

RATE = 1e-2
makers = {
    "muon": optax.contrib.muon(RATE),
    "muon, nesterov=False": optax.contrib.muon(RATE, nesterov=False),
    "adam": optax.adam(RATE),
}
found = {}
for name, optimizer in makers.items():
    weights = {"bias": jnp.zeros(256), "experts": jnp.zeros((4, 64, 256))}
    gradients = {key: jnp.ones_like(weight) for key, weight in weights.items()}
    state = optimizer.init(weights)
    for _ in range(3):
        updates, state = optimizer.update(gradients, state, weights)
        lengths = [round(-float(update.mean()) / RATE, 3) for update in updates.values()]
        found.setdefault(name, []).append(lengths)
    print(optax.__version__, name, found[name])
ones = [[1.0, 1.0]] * 3
expected = {"muon": [[1.474] * 2, [1.157] * 2, [1.078] * 2], "muon, nesterov=False": ones, "adam": ones}
sys.exit(found != expected)
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q optax==0.2.8 jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5
"$folder/venv/bin/python" "$folder/steps.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29:
#   0.2.8 muon [[1.474, 1.474], [1.157, 1.157], [1.078, 1.078]]
#   0.2.8 muon, nesterov=False [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
#   0.2.8 adam [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
