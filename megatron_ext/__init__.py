"""Pretraining of GPT models on megatron-core. Importing this package imports nothing heavy.

    from megatron_ext import pretrain, evaluate, generate, convert, plan

    trained = pretrain(num_layers=4, hidden_size=128, ..., save="run")

docs/python.md shows each function. They are imported when they are asked for.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.missing_packages import explain

if TYPE_CHECKING:
    from megatron_ext.train.from_python import pretrain as pretrain

__version__ = "0.2.0"

explain()


def __getattr__(name: str) -> Any:
    """Return a function of the package, which the core or a plugin has (`registry.functions`).

    Raises:
        AttributeError: there is none of this name.
    """
    here = Path(__file__).parent
    if not name.startswith("_") and not (here / name).exists() and not (here / f"{name}.py").exists():
        from megatron_ext.registry import functions, load

        places = functions()
        if name in places:
            return load(places[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from megatron_ext.registry import functions

    return sorted({name for name in globals() if name.startswith("__")} | functions().keys())
