#!/usr/bin/env bash
# torch 2.15.0, emerging-optimizers 0.3.0: asking three optimizers for their state before training replaces weights.
#
# Question: a layer of 64 x 64 has weights of standard deviation 0.02, so of norm 1.29. get_optimizer_state_dict of
# torch.distributed.checkpoint (which loading a checkpoint calls first, too) is called before the first step. With which
# of the optimizers of emerging-optimizers and of torch.optim do the weights change, and to which norm?
# Expected: with none, for asking is no step. Measured: Spel 8.03, ObliqueSGD 8, ObliqueAdam 8; 21 others keep them to
# the bit. The function takes a step with a rate of 0 and gradients of zero where there is no state yet, and those three
# project the weights after every step, whatever the rate is.
# Two readers, asked blindly: Spel alone; all three, which is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/ask.py" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from emerging_optimizers import orthogonalized_optimizers, psgd, registry, riemannian_optimizers, scalar_optimizers
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

OF_TORCH = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD Muon".split()
OF_EMERGING = "muon mop muon_hyperball polargrad scion laprop lion psgd_pro spel oblique_sgd oblique_adam".split()
makers = {name: getattr(torch.optim, name) for name in OF_TORCH}
makers |= {name: registry.get_optimizer_cls(name) for name in OF_EMERGING}
changed = {}
for name, make in makers.items():
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.normal_(layer.weight, std=0.02)
    before = layer.weight.detach().clone()
    get_optimizer_state_dict(layer, make(layer.parameters()))
    if not torch.equal(before, layer.weight):
        changed[name] = layer.weight.norm().item()
print(torch.__version__, version("emerging-optimizers"), f"{before.norm():.3f}", len(makers), "optimizers, changed:")
print(*(f"{name} {norm:.3f}" for name, norm in changed.items()))
right = list(changed) == ["spel", "oblique_sgd", "oblique_adam"]
sys.exit(not right or any(abs(norm - 8) > 0.1 for norm in changed.values()))
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.5.5 emerging-optimizers==0.3.0
"$folder/venv/bin/python" "$folder/ask.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29:
#   2.15.0+cu132 0.3.0 1.293 24 optimizers, changed:
#   spel 8.026 oblique_sgd 8.000 oblique_adam 8.000
