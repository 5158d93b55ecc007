"""States without names, of 16-bit runs without ZeRO, are found by the weights that they round to."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.plugins.huggingface.importer import import_huggingface
from megatron_ext.plugins.migrate.deepspeed_checkpoint.importer import import_deepspeed
from tests.support.deepspeed_folders import arrays_of, states_of, write_both


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("changed", [False, True])
def test_states_without_names_are_found_by_the_weights(
    flat: bool, changed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two tensor-parallel ranks x two pipeline stages without ZeRO. A master that is not rounded to its weight makes
    all doubtful: weights are read alone."""
    write_both(tmp_path, "gpt_neox", 2)
    tag = tmp_path / "saved/global_step7"
    for path in tag.glob("mp_rank_*"):
        torch.save(torch.load(path, weights_only=False), tag / f"mp_rank_{int(path.name[8:10]) + 2:02}_model_states.pt")
    for rank, stage in itertools.product(range(2), range(2)):
        own = {}
        for path in sorted(tag.glob(f"layer_*-model_{rank:02}-model_states.pt"))[3 * stage :][: 3 - stage]:
            wide = torch.load(path)
            torch.save({name: one.bfloat16() for name, one in wide.items()}, path)
            own |= {f"{path.name[:8]}.{name}": one for name, one in wide.items() if "inv_freq" not in name}
        groups = [[one for one in own.values() if (one.dim() > 1) == big] for big in (True, False)]
        if changed and rank and stage:
            groups[1][-1][0] *= 2
        masters = [torch.cat([one.flatten() for one in group]) if flat else group for group in groups]
        vectors = masters if flat else [one for group in masters for one in group]
        state = {number: {"step": 7, "exp_avg": -one, "exp_avg_sq": one**2} for number, one in enumerate(vectors)}
        saved = {"fp32_groups_flat" if flat else "fp32_groups": masters, "optimizer_state_dict": {"state": state}}
        file = tag / f"mp_rank_{2 * stage + rank:02}_model_states.pt"
        torch.save(torch.load(file, weights_only=False) | {"optimizer": saved}, file)
    import_huggingface(tmp_path / "hf", tmp_path / "from hf")
    import_deepspeed(tag, tmp_path / "ours")
    assert ("weights alone" in capsys.readouterr().out) == changed
    functions = lambda one: one, lambda one: -one, lambda one: one**2
    for found, function in zip(() if changed else states_of(tmp_path / "ours").values(), functions, strict=not changed):
        for name, weight in arrays_of(tmp_path / "from hf").items():
            np.testing.assert_array_equal(found[name], function(weight), name)
