"""Reinforcement learning and evaluation of language models on verifiable tasks.

Everything here is loaded when it is first used, so `import verifiers` is quick and needs no extra.
`from verifiers import *` leaves out the names that need an extra, some of which would load torch.
"""

from __future__ import annotations

import functools
import sys

_NEED_AN_EXTRA = (
    "verifiers.integrations.mcp",
    "verifiers.integrations.reasoning_gym",
    "verifiers.integrations.textarena",
    "verifiers.train.",
)
"""How the modules begin whose public names need an extra."""

_SUBMODULES = {
    "cli",
    "data",
    "envs",
    "errors",
    "evals",
    "parsers",
    "rollouts",
    "rubrics",
    "sandbox",
    "scripts",
    "testing",
    "train",
    "types",
    "utils",
}


@functools.cache
def _public_names() -> dict[str, tuple[str, str]]:
    """Return the module of each public name, and its name there, as the stub for type checkers has them."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: (f"{__name__}.{node.module}", alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        value = _version()
    elif name == "__all__":
        value = sorted(name for name, (module, _) in _public_names().items() if not module.startswith(_NEED_AN_EXTRA))
    elif name in _SUBMODULES:
        import importlib

        value = importlib.import_module(f"{__name__}.{name}")
    elif name in _public_names():
        value = _imported(name)
    else:
        from verifiers.classic.import_paths import classic_name

        value = classic_name(__name__, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    given = {*globals(), *_public_names(), *_SUBMODULES, "__all__", "__version__"}
    return sorted(given - {"annotations", "functools", "sys"})


def _imported(name: str) -> object:
    import importlib

    module, attribute = _public_names()[name]
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        from verifiers.installation import missing_extra

        sentence = missing_extra(f"verifiers.{name}", error)
        if sentence is None:
            raise
        raise AttributeError(sentence) from error


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        # a checkout that is on the path without being installed
        return "1.0.0.dev0"


class _ClassicPaths:
    """A finder of modules of the classic package that have no file here; it is asked last."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if not name.startswith("verifiers."):
            return None
        from verifiers.classic.import_paths import classic_spec

        return classic_spec(name)


sys.meta_path.append(_ClassicPaths)
