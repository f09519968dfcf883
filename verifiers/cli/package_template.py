"""The files of a new environment package, as `vf-init` writes them: a small real task that runs as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from verifiers.cli.template_tasks import TASKS, Part, Task
from verifiers.cli.template_tests import TESTS

__all__ = ["Kind", "package_files"]

Kind = Literal["single-turn", "multi-turn", "tool"]

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "{summary}"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["verifiers"]

[project.entry-points."verifiers.environments"]
{name} = "{module}:load_environment"

[tool.hatch.build.targets.wheel]
{shipped}

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_README = """\
# {name}

{summary}

    vf-install {name}
    vf-eval {name} -m MODEL -b URL
    vf-play {name}

| argument | default | meaning |
|---|---|---|
{arguments}

## Rewards

{rewards}

## Tests

    python -m pytest {module}

from the directory that holds this one; nothing needs to be installed but verifiers and pytest. They play the
environment against a fake endpoint: right answers score 1, wrong ones 0.
"""


@dataclass(frozen=True, slots=True)
class _Imports:
    standard: frozenset[str]
    local: tuple[tuple[str, str], ...] = ()
    verifiers: bool = False

    def text(self) -> str:
        blocks = [
            "\n".join(sorted(self.standard)),
            "import verifiers as vf" if self.verifiers else "",
            "\n".join(f"from .{part} import {names}" for part, names in self.local),
        ]
        return "\n\n".join(block for block in blocks if block)


def package_files(name: str, module: str, *, kind: Kind, multi_file: bool) -> Mapping[str, str]:
    """The text of each file of the package, by its path relative to the package's directory.

    Args:
        name: of the distribution and of the environment.
        module: of the import.
    """
    task = TASKS[kind]
    shipped = f'packages = ["{module}"]' if multi_file else f'only-include = ["{module}.py"]'
    rewards = "\n".join(f"- `{reward}`: {meaning}" for reward, meaning in task.rewards)
    arguments = "\n".join(
        f"| `{argument}` | {default} | {meaning} |" for argument, default, meaning in task.arguments
    )
    readme = _README.format(name=name, module=module, summary=task.summary, arguments=arguments, rewards=rewards)
    return {
        "pyproject.toml": _PYPROJECT.format(name=name, module=module, summary=task.summary, shipped=shipped),
        "README.md": readme,
        f"tests/test_{module}.py": TESTS[kind].replace("MODULE", module),
        **(_many_files(task, module) if multi_file else {f"{module}.py": _one_file(task)}),
    }


def _one_file(task: Task) -> str:
    standard = frozenset(line for part in task.parts for line in part.imports)
    head = f'"""{task.summary}"""\n\n{_Imports(standard, verifiers=True).text()}\n'
    return _joined(head, [part.code for part in task.parts])


def _many_files(task: Task, module: str) -> dict[str, str]:
    files = {
        f"{module}/__init__.py": (
            f'"""{task.summary}"""\n\nfrom .environment import load_environment\n\n__all__ = ["load_environment"]\n'
        )
    }
    for part in task.parts:
        files[f"{module}/{part.name}.py"] = _part_file(part)
    return files


def _part_file(part: Part) -> str:
    imports = _Imports(frozenset(part.imports), part.needs, verifiers="vf." in part.code).text()
    head = f'"""{part.docstring}"""\n' + (f"\n{imports}\n" if imports else "")
    return _joined(head, [part.code])


def _joined(head: str, codes: Sequence[str]) -> str:
    text, after_imports = head, True
    for code in codes:
        # one empty line between imports and a value, else two
        text += ("\n" if after_imports and not code.startswith(("def ", "class ")) else "\n\n") + code
        after_imports = False
    return text
