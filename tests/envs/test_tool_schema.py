"""A function's definition as a tool: what openai-agents makes of it, and what it cannot."""

from __future__ import annotations

import datetime
import enum
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from verifiers.envs.tools import as_tool, strict_schema
from verifiers.errors import ConfigError, ToolParseError
from verifiers.utils.tool_utils import convert_func_to_oai_tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    """A point in the plane."""

    x: int
    y: float = 0


class Tree(BaseModel):
    name: str
    children: list[Tree] = []
    parent: Optional[Tree] = None  # noqa: UP045


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    home: Point


class Options(TypedDict):
    depth: int


class Connection: ...


def nothing() -> None: ...


def google(a: int, b: str = "x", *rest: int) -> int:
    """Add things.

    The second paragraph.

    Args:
        a: the first,
            over two lines
        b (str): the second
        *rest: all others

    Returns:
        the sum
    """
    return a + len(b) + sum(rest)


def google_without_blank_line(a: int) -> None:
    """Add things.
    Args:
        a: the first
    """


def numpy_style(a: int, b: list[str] | None = None) -> None:
    """Add things.

    Parameters
    ----------
    a : int
        The first.
    b
        The second.

    Returns
    -------
    None
    """


def sphinx(a: Literal["x", "y"], b: int | None = None) -> None:
    """Add things.

    :param a: the first
    :param b: the second
    :return: nothing
    """


def nested(p: Point, t: Tree, c: Colour = Colour.RED, *, o: Options, many: list[Point] = []) -> None:  # noqa: B006
    """Nest.

    Args:
        c: a colour
        t: a tree
    """


def described(
    a: Annotated[int, "how many"],
    b: Annotated[int, Field(ge=1, description="how much")] = 2,
    c: str = Field("y", description="which"),
) -> None: ...


def animal(pet: Annotated[Cat | Dog, Field(discriminator="kind")], other: Union[Cat, Dog, None] = None) -> None:  # noqa: UP007
    """Feed one."""


def loose(a, b=3, *, c: Any = None) -> None:  # type: ignore[no-untyped-def]
    """No annotations."""


def exotic(t: tuple[int, str], s: set[int], when: datetime.datetime, n: float = 1e3, flag: bool = False) -> None: ...


FUNCTIONS = [
    nothing, google, google_without_blank_line, numpy_style, sphinx, nested, described, animal,
]  # fmt: skip


@pytest.mark.parametrize("func", FUNCTIONS, ids=lambda func: func.__name__)
def test_the_definition_is_what_openai_agents_gives_in_strict_mode(func: Callable[..., Any]) -> None:
    from agents import function_tool
    from agents.function_schema import function_schema as theirs

    peer = theirs(func)
    assert convert_func_to_oai_tool(func) == {
        "type": "function",
        "function": {
            "name": peer.name,
            "description": peer.description or "",
            "parameters": peer.params_json_schema,
            "strict": True,
        },
    }
    tool = function_tool(func)
    assert tool.params_json_schema == convert_func_to_oai_tool(func)["function"]["parameters"]


def test_names_that_pydantic_reserves_are_names_like_others() -> None:
    def tool(json: str, schema: int, model_config: int, self: int, _private: int = 3) -> Any:
        return json, schema, model_config, self, _private

    schema = as_tool(tool)
    shown = schema.schema["function"]["parameters"]
    assert list(shown["properties"]) == ["json", "schema", "model_config", "self", "_private"]
    assert shown["properties"]["json"] == {"title": "Json", "type": "string"}
    positional, keywords = schema.bind({"json": "j", "schema": 1, "model_config": 2, "self": 4})
    assert tool(*positional, **keywords) == ("j", 1, 2, 4, 3)


def test_a_tool_that_takes_any_object_is_not_strict_but_works() -> None:
    def table(rows: dict[str, int]) -> None: ...

    def anything(a: int, **others: str) -> Any:
        return a, others

    assert convert_func_to_oai_tool(table)["function"]["strict"] is False
    definition = convert_func_to_oai_tool(anything)["function"]
    assert (definition["strict"], definition["parameters"]["additionalProperties"]) == (False, True)
    assert list(definition["parameters"]["properties"]) == ["a"]
    positional, keywords = as_tool(anything).bind({"a": 1, "b": "x"})
    assert anything(*positional, **keywords) == (1, {"b": "x"})


def test_partials_and_callable_objects_are_tools_and_what_is_bound_is_not_shown() -> None:
    def search(query: str, index: dict[str, str], limit: int = 3) -> Any:
        """Search the index.

        Args:
            query: what for
        """
        return query, index, limit

    class Adder:
        """Adds."""

        def __call__(self, a: int, b: int) -> int:
            return a + b

    index = {"k": "v"}
    schema = as_tool(functools.partial(search, index=index))
    function = schema.schema["function"]
    assert (function["name"], function["description"]) == ("search", "Search the index.")
    assert list(function["parameters"]["properties"]) == ["query", "limit"]
    positional, keywords = schema.bind({"query": "q"})
    assert functools.partial(search, index=index)(*positional, **keywords) == ("q", index, 3)
    function = convert_func_to_oai_tool(Adder())["function"]
    assert (function["name"], function["description"]) == ("Adder", "Adds.")
    assert function["parameters"]["required"] == ["a", "b"]


def test_arguments_become_what_the_signature_says() -> None:
    def tool(p: Point, t: Tree, c: Colour, when: datetime.date, n: int, pair: tuple[int, int]) -> Any:
        return p, t, c, when, n, pair

    raw = {
        "p": {"x": 1}, "t": {"name": "root", "children": [{"name": "leaf"}]}, "c": "blue", "when": "2024-02-29",
        "n": "7", "pair": [1, 2],
    }  # fmt: skip
    positional, keywords = as_tool(tool).bind(json.loads(json.dumps(raw)))
    p, t, c, when, n, pair = tool(*positional, **keywords)
    assert (p, c, when, n, pair) == (Point(1, 0), Colour.BLUE, datetime.date(2024, 2, 29), 7, (1, 2))
    assert t.children[0].name == "leaf"


def test_positional_only_and_variadic_parameters_are_called_as_they_must_be() -> None:
    def tool(a: int, /, b: int = 2, *rest: int, c: int = 3) -> Any:
        return a, b, rest, c

    schema = as_tool(tool)
    for given, result in [({"a": 1}, (1, 2, (), 3)), ({"a": 1, "rest": [5, 6], "c": 4}, (1, 2, (5, 6), 4))]:
        positional, keywords = schema.bind(given)
        assert tool(*positional, **keywords) == result


def test_every_wrong_argument_is_named_at_once() -> None:
    def tool(a: int, b: str, c: Literal["x"] = "x") -> None: ...

    with pytest.raises(ToolParseError) as caught:
        as_tool(tool).bind({"a": "many", "d": 1, "c": "y"})
    text = str(caught.value)
    assert "'tool'" in text
    for part in ("a: Input should be a valid integer", "'many'", "b is missing", "d is not a parameter", "c: "):
        assert part in text


def test_hidden_arguments_and_what_only_they_refer_to_are_not_in_the_schema() -> None:
    def tool(query: str, point: Point, connection: Connection) -> Any:
        """Ask.

        Args:
            query: what
            connection: internal
        """
        return query, point, connection

    with pytest.raises(ConfigError, match=r"'tool'.*args_to_skip"):
        as_tool(tool)
    schema = as_tool(tool, hidden=["connection", "point"])
    assert schema.schema["function"]["parameters"] == {
        "type": "object",
        "title": "tool_args",
        "properties": {"query": {"title": "Query", "type": "string", "description": "what"}},
        "required": ["query"],
        "additionalProperties": False,
    }
    connection, point = Connection(), Point(1)
    positional, keywords = schema.bind({"query": "q", "connection": connection, "point": point})
    result = tool(*positional, **keywords)
    assert result[1] is point
    assert result[2] is connection
    with pytest.raises(ConfigError, match=r"'connection'.*update_tool_args"):
        schema.bind({"query": "q", "point": point})
    with pytest.raises(ConfigError, match="no parameter 'nope' to hide"):
        as_tool(tool, hidden=["nope"])


def test_a_hidden_argument_may_have_a_type_that_does_not_exist_at_run_time() -> None:
    def tool(query: str, box: Box) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert as_tool(tool, hidden=["box"]).schema["function"]["parameters"]["required"] == ["query"]
    with pytest.raises(ConfigError, match="'tool' cannot be resolved"):
        as_tool(tool)


def test_what_strict_mode_cannot_say_is_none() -> None:
    assert strict_schema({"type": "object", "additionalProperties": {"type": "integer"}}) is None
    assert strict_schema({"type": "array", "items": {"type": "object", "additionalProperties": True}}) is None


def test_tools_are_light_to_import() -> None:
    code = (
        "import sys, verifiers as vf; vf.ToolEnv\n"
        "from verifiers.envs.tools import convert_func_to_oai_tool as convert\n"
        "def f(a: int):\n    'Do it.'\n"
        "convert(f)\n"
        "print([m for m in ('agents', 'openai', 'torch', 'datasets') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def file(path: Path) -> str:
    """Path."""
    return str(path)


@pytest.mark.parametrize("tool", [loose, exotic, file])
def test_what_openais_strict_mode_refuses_is_no_strict_definition(tool: Any) -> None:
    function: Any = as_tool(tool).schema["function"]
    assert function["strict"] is False
    assert function["parameters"]["properties"]


def day(on: datetime.date, kind: Literal["a", "b"], of: list[int] | None = None) -> str:
    """Day."""
    return f"{on} {kind} {of}"


def test_what_it_takes_is_strict() -> None:
    function: Any = as_tool(day).schema["function"]
    assert function["strict"] is True
    assert function["parameters"]["required"] == ["on", "kind", "of"]
