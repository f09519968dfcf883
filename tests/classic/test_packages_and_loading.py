"""Section "Packages and commands": environments by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf

PYPROJECT_FREE = """
import verifiers as vf
def load_environment(size: int = 2, **kwargs) -> vf.Environment:
    rows = [{"question": "q", "answer": "a"}] * size
    return vf.SingleTurnEnv(dataset=rows, **kwargs)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module that can be imported, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        names.append(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_hyphens_are_underscores_and_arguments_are_passed(module: Any) -> None:
    module("tiny_classic_env", PYPROJECT_FREE)
    env = vf.load_environment("tiny-classic-env", size=3, system_prompt="s")
    assert isinstance(env, vf.Environment)
    assert len(env.get_dataset()) == 3
    assert len(vf.load_environment("tiny_classic_env").get_dataset()) == 2
    assert len(vf.load_environment("someone/tiny-classic-env").get_dataset()) == 2


def test_an_unknown_name_is_a_value_error_with_close_matches(module: Any) -> None:
    module("tiny_classic_env", PYPROJECT_FREE)
    with pytest.raises(ValueError, match=r"no environment 'tiny-clasic-env'.*'tiny_classic_env'"):
        vf.load_environment("tiny-clasic-env")


def test_an_error_inside_is_a_runtime_error_with_its_cause(module: Any) -> None:
    module("breaks_when_made", "def load_environment():\n    raise KeyError('no data')")
    module("breaks_at_import", "import no_such_module_anywhere")
    with pytest.raises(RuntimeError, match="could not be made: KeyError") as caught:
        vf.load_environment("breaks-when-made")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RuntimeError, match="needs the module 'no_such_module_anywhere'") as caught:
        vf.load_environment("breaks-at-import")
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_module_without_the_function_or_with_other_arguments_says_so(module: Any) -> None:
    module("has_no_loader", "x = 1")
    module("takes_no_size", "import verifiers as vf\ndef load_environment(level=1):\n    return None")
    with pytest.raises(ValueError, match="no function load_environment"):
        vf.load_environment("has-no-loader")
    with pytest.raises(ValueError, match="it takes level=1"):
        vf.load_environment("takes-no-size", size=3)


def test_the_classic_module_of_the_command_is_the_command() -> None:
    from verifiers.cli.evaluate import main
    from verifiers.scripts.eval import main as classic

    assert classic is main
