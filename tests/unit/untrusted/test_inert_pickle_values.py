"""Plain data comes out of the inert reader as Python's own pickle gives it back, in every protocol and size of a field;
objects come out as a record of themselves."""

import collections
import fractions
import pickle
from typing import Any

import pytest

from megatron_ext.untrusted.inert_pickle import Global, Made, Stored, plain_text, read

SHARED = ["one list", 1]
VALUES: list[Any] = [
    None, True, False, 0, 1, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, -1, -128, -32769, -(2**31), 2**31, 2**40,
    -(2**63), 2**200, -(2**200), 0.0, -0.5, 1e308, float("inf"), "", "a", "é漢", "x" * 255, "x" * 256, "x" * 70_000,
    b"", b"a", b"x" * 255, b"x" * 256, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), tuple(range(300)), [], [1], [1, 2],
    list(range(300)), {}, {"a": 1}, {"a": 1, "b": 2}, {None: 0, True: 1, 2.5: 2, "x": 3, -7: 4},
    {str(number): number for number in range(300)}, [[], {}, ()], {"a": {"b": ({"c": [1, (2, "d")]},)}},
    [SHARED, SHARED, {"again": SHARED}], [f"name {number % 280}" for number in range(600)],
]  # fmt: skip


def from_bytes(protocol: int, value: Any) -> bool:
    """Whether that protocol writes it by a call: bytes had no opcode before protocol 3."""
    return protocol < 3 and isinstance(value, bytes)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_what_pickle_gives_back(protocol: int) -> None:
    for value in VALUES:
        if not from_bytes(protocol, value):
            found = read(pickle.dumps(value, protocol), allowed=())
            assert (type(found), found) == (type(value), value)
    found = read(pickle.dumps([SHARED, {"again": SHARED}], protocol), allowed=())
    assert found[0] is found[1]["again"], "one list stays one"
    long = pickle.BINUNICODE8 + (2).to_bytes(8, "little") + b"ab"  # as texts of more than 4 GB begin
    assert read(long + pickle.STOP, allowed=()) == "ab"


def test_a_protocol_that_no_checkpoint_has_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        read(pickle.dumps([1.5, "a"], 0), allowed=())


def test_a_newer_protocol_is_refused() -> None:
    assert read(b"\x80\x05N.", allowed=()) is None
    with pytest.raises(pickle.UnpicklingError, match="newer protocol than 5"):
        read(b"\x80\x06N.", allowed=())


NAMES = {("fractions", "Fraction"), ("collections", "OrderedDict")}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_object_is_a_record_of_how_it_was_made(protocol: int) -> None:
    ordered = collections.OrderedDict([("b", 1), ("a", [2])])
    made = read(pickle.dumps([ordered, fractions.Fraction(2, 3), fractions.Fraction], protocol), allowed=NAMES)
    assert (made[0].kind, made[0].args, made[0].items) == (
        Global("collections", "OrderedDict"), (), [("b", 1), ("a", [2])],
    )  # fmt: skip
    assert (made[1].kind.name, made[1].state, made[1].items) == ("Fraction", None, [])
    assert made[2] == Global("fractions", "Fraction")
    for name in NAMES:
        with pytest.raises(
            pickle.UnpicklingError, match=r"asks for \w+\.\w+, which no checkpoint needs: nothing of it"
        ):
            read(pickle.dumps([ordered, fractions.Fraction(2, 3)], protocol), allowed=NAMES - {name})
    assert read(pickle.dumps(fractions.Fraction(2, 3), protocol), allowed=None).kind.module == "fractions"


_OBJECT = b"\x80\x02cm\nC\n)\x81"


def test_what_is_set_or_appended_is_kept_in_order() -> None:
    made = read(_OBJECT + b"K\x01a(K\x02K\x03eK\x04K\x05s(K\x06K\x07K\x08K\x09u}b.", allowed=None)
    assert isinstance(made, Made)
    assert (made.items, made.state) == ([1, 2, 3, (4, 5), (6, 7), (8, 9)], {})


@pytest.mark.parametrize("state", [b"}", b")", b"]", b"K\x00", b"\x89"])
def test_an_object_is_changed_once_whatever_its_state_was(state: bytes) -> None:
    assert read(_OBJECT + state + b"b.", allowed=None).state is not None
    with pytest.raises(pickle.UnpicklingError, match="changes an object of C twice"):
        read(_OBJECT + state + b"b" + state + b"b.", allowed=None)


@pytest.mark.parametrize(
    ("payload", "refusal"),
    [
        (b"]K\x01K\x02s.", "sets items of a list"),
        (b"}K\x01a.", "appends to a dict"),
        (b")K\x01a.", "appends to a tuple"),
        (b"K\x05)R.", "calls 5"),
        (b"cm\nC\nK\x05R.", "calls a Global"),
        (b"cm\nC\n}b.", "would change m.C, which is no object that it made"),
        (b"]}b.", "would change a list, which is no object"),
        (b"}]K\x01s.", "has a list for a key"),
        (b"}(K\x01K\x02K\x03u.", "is damaged: ValueError"),
        (b"h\x05.", "is damaged: KeyError"),
        (b"X\xff\xff\x00\x00a.", "is damaged"),
        (b"a.", "is damaged: IndexError"),
        (b"(K\x01", "is damaged: IndexError"),
        (b"K\x01K\x02\x93.", "asks for something whose name is no text"),
        (b"U\x01a.", "holds the opcode 0x55, which no checkpoint needs"),
    ],
)
def test_what_makes_no_sense_is_named(payload: bytes, refusal: str) -> None:
    with pytest.raises(pickle.UnpicklingError) as caught:
        read(b"\x80\x02" + payload, allowed=None)
    assert str(caught.value).startswith(refusal)


@pytest.mark.parametrize(("key", "taken"), [(2**32 - 1, True), (2**32, False), (-(2**32) + 1, True), (-(2**32), False)])
def test_numbers_that_are_keys_are_small(key: int, taken: bool) -> None:
    """Larger ones may be chosen so that their hashes meet."""
    content = pickle.dumps({key: "x"}, 2)
    if taken:
        assert read(content, allowed=()) == {key: "x"}
    else:
        with pytest.raises(pickle.UnpicklingError, match=f"has {key} for a key"):
            read(content, allowed=())


def test_tensors_elements_are_taken_only_where_they_may_be_there() -> None:
    content = b"\x80\x02K\x07Q."
    found = read(content, allowed=(), stored=True)
    assert isinstance(found, Stored)
    assert found.place == 7
    with pytest.raises(pickle.UnpicklingError, match="refers to something outside of it"):
        read(content, allowed=())


@pytest.mark.parametrize(
    ("value", "text"), [(5, "5"), (None, "None"), ("é", "'\\xe9'"), ("a" * 200, "'" + 99 * "a"), ([1] * 9, "a list")]
)
def test_a_value_in_a_message_is_short_and_plain(value: object, text: str) -> None:
    assert plain_text(value) == text
