"""Environments by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from verifiers.envs import registry
from verifiers.envs.registry import load_environment
from verifiers.errors import ConfigError, EnvironmentLoadError, Error, UnknownEnvironmentError

AddModule = Callable[[str, str], None]

SPELLING = """
def load_environment(words=3, *, seed=0):
    return ("spelling", words, seed)
"""


@pytest.fixture
def add_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddModule]:
    """Write a module that can be imported; it is forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def add(name: str, source: str) -> None:
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        importlib.invalidate_caches()

    yield add
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Declare entry points, as installed packages do: name -> value."""

    def declared(**values: str) -> None:
        entries = [
            EntryPoint(name.replace("_", "-"), value, registry.ENTRY_POINT_GROUP) for name, value in values.items()
        ]
        monkeypatch.setattr(registry, "_entry_points", lambda: entries)

    return declared


@pytest.mark.parametrize("env_id", ["my-spelling", "my_spelling", "someone/my-spelling"])
def test_a_module_is_found_by_its_name_with_hyphens_or_underscores(add_module: AddModule, env_id: str) -> None:
    add_module("my_spelling", SPELLING)
    result: Any = load_environment(env_id, words=5)
    assert result == ("spelling", 5, 0)


def test_a_package_and_a_module_inside_one_are_found(add_module: AddModule) -> None:
    add_module("my_pack/__init__", "from my_pack.inner import load_environment")
    add_module("my_pack/inner", SPELLING)
    found: Any = [load_environment("my-pack"), load_environment("my-pack.inner")]
    assert found == [("spelling", 3, 0)] * 2


def test_an_environment_is_called_what_it_was_loaded_as_unless_it_has_a_name(add_module: AddModule) -> None:
    make = "def load_environment(name=''):\n    return vf.SingleTurnEnv(dataset=[{'prompt': 'a'}], env_id=name)"
    add_module("my_first", f"import verifiers as vf\n{make}")
    plain, named = load_environment("my-first"), load_environment("my-first", name="other")
    assert (vars(plain)["env_id"], vars(plain)["env_args"]) == ("my-first", {})
    assert (vars(named)["env_id"], vars(named)["env_args"]) == ("other", {"name": "other"})


@pytest.mark.parametrize("env_id", ["counting", "my-counting", "my_counting"])
def test_an_entry_point_comes_before_a_module_of_its_name(
    add_module: AddModule, declare: Callable[..., None], env_id: str
) -> None:
    add_module("my_counting", "def load_environment(): return 'module'")
    add_module("elsewhere", "def make(): return 'entry point'\ndef load_environment(): return 'default'")
    declare(my_counting="elsewhere:make", counting="elsewhere")
    result: Any = load_environment(env_id)
    assert result == ("default" if env_id == "counting" else "entry point")


@pytest.mark.parametrize("name", [3, None])
def test_a_name_that_is_no_text_is_refused_with_its_value(name: Any) -> None:
    with pytest.raises(ConfigError, match=f"env_id is {name}"):
        load_environment(name)


def test_an_unknown_name_is_told_the_nearest_and_how_to_install(
    add_module: AddModule, declare: Callable[..., None]
) -> None:
    add_module("my_spelling_env", SPELLING)
    add_module("my_spelling_en", "raise RuntimeError('looking for names must not run anything')")
    declare(my_spellings="elsewhere:make")
    with pytest.raises(UnknownEnvironmentError) as caught:
        load_environment("my-speling-env")
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert "'my-speling-env'" in text
    assert "'my-spellings', 'my_spelling_env'" in text
    assert "'my_spelling_en'" not in text, "it has no load_environment"
    assert "vf-install DIRECTORY_OR_URL" in text
    assert text.count(". ") == 0, "one sentence"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = 1", "has no function load_environment"),
        ("load_environment = 3", "has no function load_environment"),
        ("def load_environment(): pass", "returned None"),
        ("import verifiers as vf\ndef load_environment(): raise vf.ConfigError('words < 1')", r"^words < 1$"),
    ],
)
def test_a_mistake_in_the_package_or_its_settings_is_told(add_module: AddModule, source: str, text: str) -> None:
    add_module("my_spelling", source)
    with pytest.raises(ConfigError, match=text) as caught:
        load_environment("my-spelling")
    assert not isinstance(caught.value, UnknownEnvironmentError)


def test_an_error_inside_is_chained_and_the_last_line_of_the_users_own_is_shown(add_module: AddModule) -> None:
    add_module("my_spelling", "import json\n\ndef load_environment(): return read()\n\ndef read(): json.loads('{')")
    with pytest.raises(RuntimeError, match="could not be made: JSONDecodeError") as caught:
        load_environment("my-spelling")
    assert str(caught.value).endswith("(my_spelling.py, line 5: def read(): json.loads('{'))")
    assert isinstance(caught.value.__cause__, ValueError)
    assert isinstance(caught.value, Error)


@pytest.mark.parametrize("through_entry_point", [True, False])
def test_a_missing_dependency_is_not_an_unknown_environment(
    add_module: AddModule, declare: Callable[..., None], through_entry_point: bool
) -> None:
    add_module("my_spelling", "import no_such_dependency.part")
    if through_entry_point:
        declare(my_spelling="my_spelling:load_environment")
    with pytest.raises(
        EnvironmentLoadError,
        match=r"'no_such_dependency', which is not installed; install the package that provides it",
    ) as caught:
        load_environment("my-spelling")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_wrong_arguments_name_the_accepted_ones(add_module: AddModule) -> None:
    add_module("my_spelling", SPELLING)
    with pytest.raises(ConfigError, match=r"'wrds'.*it takes words=3, seed=0"):
        load_environment("my-spelling", wrds=3)
    add_module("my_needy", "def load_environment(path: str): return path")
    with pytest.raises(ConfigError, match=r"'path'.*it takes path: str"):
        load_environment("my-needy")
    add_module("my_bare", "def load_environment(): return 1")
    with pytest.raises(ConfigError, match="it takes none"):
        load_environment("my-bare", words=3)


@pytest.mark.parametrize(
    "made",
    [
        "async def load_environment(): return 1",
        "def load_environment(): return object",
        "def load_environment(): return [{'question': '?'}]",
    ],
)
def test_what_is_no_environment_yet_is_told_so(add_module: AddModule, made: str) -> None:
    add_module("my_spelling", made)
    with pytest.raises(ConfigError, match="it must return an environment itself"):
        load_environment("my-spelling")
