"""The table of the engine's seams names all that our source touches, and nothing that it does not."""

from collections.abc import Iterable

import pytest

from megatron_ext.seams.table import SEAMS
from tests.support.engine_accesses import Access, Source, accesses, mentioned, sources

NAMES = [seam.name for seam in SEAMS]
PLANTED = {
    "an attribute": "def f(weight):\n    return weight._version_counter\n",
    "an attribute through an import": "import torch\nx = torch._private_function()\n",
    "an attribute through a local import": "def f():\n    import torch.cuda as c\n    c._sleep(1)\n",
    "a private operator": "import torch\nf = torch.ops.aten._private_operator\n",
    "an import of a private name": "from megatron.core.optimizer import _private_function\n",
    "an import from a private module": "from torch._private import thing\n",
    "an import of a private module": "import torch._private.thing\n",
    "a text for getattr": "def f(x):\n    return getattr(x, '_private_field', None)\n",
    "a path in a table": "PATHS = ('torch.cuda._private_function',)\n",
    "the bytes of a pickle": "x = b'ctorch._private\\n_rebuild_other\\n'\n",
    "an override of a private method": (
        "from megatron.core.models.gpt import GPTModel\n"
        "class Ours(GPTModel):\n    def _scale_logits(self, *args):\n        pass\n"
    ),
    "an override of a public method of megatron-core": (
        "from megatron.core.transformer.moe.router import TopKRouter\n"
        "class Ours(TopKRouter):\n    def apply_z_loss(self, logits):\n        pass\n"
    ),
    "an override by a class of a class": (
        "from megatron.core.optimizer.optimizer import FP32Optimizer\n"
        "class Ours(FP32Optimizer):\n    pass\n"
        "class Other(Ours):\n    def get_loss_scale(self):\n        pass\n"
    ),
    "a call of an inherited private method": (
        "from megatron.core.models.gpt import GPTModel\n"
        "class Ours(GPTModel):\n    def ours(self):\n        return self._concat_embeddings()\n"
    ),
    "an attribute that the engine's class reads": (
        "from megatron.core.optimizer.optimizer import FP32Optimizer\n"
        "class Ours(FP32Optimizer):\n    def __init__(self):\n        self.is_stub_optimizer = True\n"
    ),
    "a replaced function of a module": "from megatron.core import utils\nutils.get_pg_size = len\n",
    "a replaced method of an object": "def f(chunk):\n    chunk.no_sync = None\n",
    "setattr on a module": "import torch\nsetattr(torch, 'compile_everything', None)\n",
    "setattr of a computed name": "def f(x, name):\n    setattr(x, name, None)\n",
}


def _uncovered(files: Iterable[Source]) -> list[Access]:
    return [access for access in accesses(files) if not access.is_covered(NAMES)]


def test_every_access_is_in_the_table() -> None:
    missing = [f"{access.place}: {access.text}  [{access.name}]" for access in _uncovered(sources())]
    assert not missing, "name these in megatron_ext/seams/, with why and what a canary checks:\n" + "\n".join(missing)


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_access_is_found(what: str) -> None:
    found = _uncovered([Source("megatron_ext/planted.py", PLANTED[what])])
    assert found, "nothing was found"
    assert all(access.place.startswith("megatron_ext/planted.py:") for access in found)


def test_our_own_private_names_are_no_accesses() -> None:
    code = (
        "import os\nfrom typing import NamedTuple\n"
        "class Own:\n    def __init__(self):\n        self._field = 1\n"
        "    def _method(self, other: 'Own'):\n        return other._field + os._exit(0)\n"
        "def f(place):\n    return place._replace(x=1), f'_suffix{place}'\n"
    )
    assert not list(accesses([Source("megatron_ext/planted.py", code)]))


def test_a_row_that_nothing_uses_must_go() -> None:
    used = mentioned(sources())
    assert not [seam.name for seam in SEAMS if seam.attribute not in used]


def test_names_are_given_once() -> None:
    assert len(NAMES) == len(set(NAMES)), sorted({name for name in NAMES if NAMES.count(name) > 1})
