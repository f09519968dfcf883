"""The functions of reasoning-gym's scoring that run in a worker process, and values as text on their way there.

Some scorers hand the model's text to `eval` or to sympy's parser, which is `eval` too. A sandbox protects the machine
from such text, but not the scorer in the same process, whose score it could forge. So text is checked before those
scorers: `eval` reads literals only, and a formula may hold numbers, names, operators and calls of mathematical
functions. Any other text scores as an empty answer does.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import decimal
import fractions
import functools
import importlib
import io
import json
import math
import re
from collections.abc import Callable
from typing import Any

from verifiers.errors import ConfigError

EVALUATING_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorers call `eval` on an answer, to read a list."""

FORMULA_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorers parse an answer with sympy."""

_MATHEMATICS = """
    Abs Add Ci Ei Eq Integer Integral Mul Ne Piecewise Pow Rational Si abs acos acosh acot acoth acsc asec asin asinh
    atan atan2 atanh binomial ceiling cos cosh cot coth csc csch erf erfi exp factorial floor gamma li log ln polylog
    sec sech sign sin sinh sqrt tan tanh
"""
_FUNCTIONS = frozenset(_MATHEMATICS.split())
_CALL = re.compile(r"(\w+)\s*\(")
_KEYWORD = re.compile(r"\b(?:lambda|for|if|else|import|yield|await|async|in|is|not|and|or)\b")
_FORBIDDEN = re.compile(r"""__|["'`\\;:@={}\[\]]|[\w)]\s*\.\s*[^\W\d]|\)\s*\(""")


def score(task: str, settings: str, entry: str, answer: str | None) -> dict[str, Any]:
    """Return the task's own score of an answer; settings and entry are texts of `dumps`.

    The answer holds `score`, and `raised`: "" or the name of the exception that the scorer raised because of this
    answer, which then scores 0. Raises where the task or the entry cannot be opened, which is not the answer's fault.
    """
    scorer = open_scorer(task, settings)
    whole_entry = loads(entry)
    if task in FORMULA_TASKS and answer is not None and not is_formula(answer):
        answer = ""
    try:
        value = float(scorer.score_answer(answer=answer, entry=whole_entry))
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        return {"score": 0.0, "raised": type(error).__name__}
    if not math.isfinite(value):
        return {"score": 0.0, "raised": "NotFinite"}
    return {"score": value, "raised": ""}


def score_in_worker(task: str, settings: str, entry: str, answer: str | None) -> dict[str, Any]:
    """Call `score` in a process whose standard output may be closed: some scorers print."""
    with contextlib.redirect_stdout(io.StringIO()):
        return score(task, settings, entry, answer)


@functools.lru_cache(maxsize=128)
def open_scorer(task: str, settings: str) -> Any:
    """Return the task's dataset, of which only the scorer is used; opened once for each setting."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=0, size=10, **loads(settings))
    if task in EVALUATING_TASKS:
        # the module's own global is found before the builtin of that name
        vars(importlib.import_module(type(dataset).__module__))["eval"] = ast.literal_eval
    return dataset


def is_formula(text: str) -> bool:
    """Return whether a text consists of numbers, names, operators and calls of mathematical functions alone."""
    if _FORBIDDEN.search(text) or _KEYWORD.search(text):
        return False
    return all(name in _FUNCTIONS or name.isdigit() for name in _CALL.findall(text))


# -- values as text --------------------------------------------------------------------------------------------

_TAG = "!"

# by name: the type, its plain form, and the way back
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, str, complex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
}


def dumps(value: Any) -> str:
    """Return the JSON text of a value, from which `loads` makes the same value again.

    Plain JSON turns tuples into lists and keys of dicts into strings, and a scorer that compares with such a value
    then scores a right answer as wrong. Here these travel as an object with the single key "!", whose value is
    [kind, parts]. Numbers and strings of subclasses (numpy's scalars, enumerations) become plain ones.

    Raises:
        ConfigError: the value holds an object of another kind.
    """
    return json.dumps(_tagged(value), ensure_ascii=False)


def loads(text: str) -> Any:
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    for plain_kind in (bool, int, float, str):
        if isinstance(value, plain_kind):
            return value if type(value) is plain_kind else plain_kind(value)
    if value is None:
        return None
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _tagged(item) for key, item in value.items()}
        return {_TAG: ["dict", [[_tagged(key), _tagged(item)] for key, item in value.items()]]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    for name, (kind, plain, _) in _KINDS.items():
        if type(value) is kind:
            return {_TAG: [name, _tagged(plain(value))]}
    if callable(getattr(value, "tolist", None)):
        # numpy's arrays and those of its scalars that are not Python numbers
        parts = _tagged(value.tolist())
        return {_TAG: ["ndarray", [str(value.dtype), parts]]} if getattr(value, "shape", ()) else parts
    raise ConfigError(
        f"A value of type {type(value).__name__} cannot be sent to a scoring process: {value!r:.200}; "
        "use numbers, strings, lists, tuples, sets, dicts, dates or arrays."
    )


def _untagged(pairs: dict[str, Any]) -> Any:
    if pairs.keys() != {_TAG}:
        return pairs
    kind, parts = pairs[_TAG]
    if kind == "dict":
        return dict(parts)
    if kind == "ndarray":
        import numpy

        return numpy.array(parts[1], dtype=parts[0])
    return _KINDS[kind][2](parts)
