"""Computes with our model the logits of folders of a family whose file is a draft."""

from collections.abc import Sequence

import torch

from megatron_ext.errors import TrainingError
from megatron_ext.registry import with_own


def drafted_logits(draft: str, folders: Sequence[str], tokens: list[list[int]]) -> list[torch.Tensor | str]:
    """Return for each folder our logits [batch, sequence, vocabulary] in fp32, or why it cannot be read. It needs a
    process of its own, whose torch it adapts.

    Args:
        draft: text of the family's module.
    """
    from megatron_ext.plugins.families.family import Family

    module: dict[str, object] = {}
    exec(draft, module)  # the text that this program has just written
    family = next(one for name, one in module.items() if isinstance(one, Family) and f"\n{name} = " in draft)
    with with_own("families", [family]):
        return [_logits(folder, torch.tensor(tokens)) for folder in folders]


def _logits(folder: str, text: torch.Tensor) -> torch.Tensor | str:
    from megatron_ext import device

    here = device.install("cpu")
    from megatron_ext.parallel import groups
    from megatron_ext.plugins.huggingface.load_hf import load_huggingface
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    sizes = f"--seq-length {text.size(1)} --micro-batch-size {text.size(0)} --train-iters 1 --lr 1e-3 --mock-data"
    rates = "--attention-dropout 0 --hidden-dropout 0 --eval-interval 0 --device cpu"
    try:
        config = configure([*sizes.split(), *rates.split(), "--load-hf", folder]).config
        run = build_run(config, here)
        load_huggingface(run, folder)
    except TrainingError as error:
        return str(error)
    except Exception as error:  # a draft may be any nonsense
        return f"{type(error).__name__}: {error}"
    finally:
        groups.destroy()
    [model] = run.chunks
    model.eval()
    with torch.no_grad():
        logits = model(text, torch.arange(text.size(1)).expand_as(text), None)
    return logits[..., : config.data.vocab_size].float()
