"""Describes model families of Hugging Face: a file for each, which holds everything that is peculiar to it.

    family = family_of(config)                         # or FAMILIES["llama"]
    for parameter in arrangement(config, family):
        print(parameter.name, [run.tensor for run in parameter.runs])

`protocol.py` says what a family consists of, `registry.py` finds the families' files and that of a configuration,
`arrangement.py` finds the rows of our parameters in a family's tensors, and `shared.py` holds what several families
have in common. `config/hf_config.py` reads and writes whole `config.json` files with them.
"""

from megatron_ext.config.families.arrangement import Arranged, Run, arrangement
from megatron_ext.config.families.protocol import Family
from megatron_ext.config.families.registry import FAMILIES, family_of, obstacles

__all__ = ["FAMILIES", "Arranged", "Family", "Run", "arrangement", "family_of", "obstacles"]
