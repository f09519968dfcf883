"""Tagged JSON gives back what it was given, where plain JSON changes it."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import json
from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.adapters.tagged_json import dumps, loads


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, 2, [3, (4,)]), "b": {5, 6}, "c": frozenset({(7,)})},
        {1: "x", (2, 3): "y", None: "z", False: "w"},
        {"!": ["tuple", [1]]},
        {"!": 3, "b": {"!": ["bytes", "x"]}},
        [datetime.datetime(2020, 1, 2, 3, 4, 5), datetime.date(2020, 1, 2), datetime.time(6, 7)],
        [b"\xff\x00", 3 + 4j, decimal.Decimal("1.10"), fractions.Fraction(1, 3)],
        {"text": 'naïve "quotes"\n\u2028', "none": None, "big": 10**40, "small": 1e-300, "inf": float("inf")},
        [],
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    back = loads(dumps(value))
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, dict)


def test_what_plain_json_keeps_is_written_as_plain_json() -> None:
    value = {"question": "q", "answer": "a", "metadata": {"numbers": [1, 2.5, True, None]}}
    assert json.loads(dumps(value)) == value


def test_numpys_numbers_become_pythons_and_its_arrays_stay_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    back = loads(dumps({"i": numpy.int64(3), "f": numpy.float64(2.5), "s": numpy.str_("a"), "b": numpy.bool_(True)}))
    assert back == {"i": 3, "f": 2.5, "s": "a", "b": True}
    array = loads(dumps(numpy.array([[1, 2]], dtype=numpy.int16)))
    assert (array.dtype, array.tolist()) == (numpy.int16, [[1, 2]])


def test_a_member_of_an_enumeration_of_strings_still_compares_alike() -> None:
    class Color(enum.StrEnum):
        RED = "red"

    assert loads(dumps([Color.RED])) == [Color.RED]


def test_what_could_not_be_given_back_is_an_error_that_shows_it() -> None:
    with pytest.raises(vf.ConfigError, match="A value of type object cannot be sent to a scoring process: <object"):
        dumps({"a": [object()]})
