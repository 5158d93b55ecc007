"""Methods of process groups that are watched, and the names of groups."""

from typing import Any

import pytest

from megatron_ext.parallel.operations import WrappedMethods, group_title


class _Backend:
    def send(self) -> str:
        return "sent"

    def recv(self) -> str:
        return "received"


class _Gloo(_Backend):
    def send(self) -> str:
        return "sent by gloo"


def test_methods_are_wrapped_and_put_back() -> None:
    """The last first, so that one that is wrapped twice is as it was; what was inherited is so again."""
    wrapped = WrappedMethods()

    def told(by: str) -> Any:
        return lambda method: lambda self: f"{by}: {method(self)}"

    wrapped.wrap(_Gloo, "send", told("first"))
    wrapped.wrap(_Gloo, "send", told("second"))
    wrapped.wrap(_Gloo, "recv", told("first"))
    wrapped.wrap(_Gloo, "no_such_method", told("first"))
    assert _Gloo().send() == "second: first: sent by gloo"
    assert _Gloo().recv() == "first: received"
    assert _Backend().recv() == "received"
    assert not hasattr(_Gloo, "no_such_method")
    wrapped.put_back()
    assert (_Gloo().send(), _Gloo().recv()) == ("sent by gloo", "received")
    assert "recv" not in vars(_Gloo)
    wrapped.put_back()
    assert _Gloo().send() == "sent by gloo"


@pytest.mark.parametrize(
    ("purpose", "title"),
    [
        ("default_pg", "the group of all ranks"),
        ("", "the group 17"),
        ("undefined", "the group 17"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "the group tensor-model-parallel"),
        ("EXPERT_DATA", "the group expert-data"),
    ],
)
def test_groups_have_names_for_people(purpose: str, title: str) -> None:
    assert group_title("17", purpose) == title
