"""The command ``vf-serve``: arguments, start, and an end that leaves nothing behind."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from verifiers.cli.main import CommandParser
from verifiers.errors import ConfigError
from verifiers.server_process import bind, exits_on_sigterm, follow_parent
from verifiers_embedded import __version__
from verifiers_embedded.errors import StartError
from verifiers_embedded.text.tool_calls import FORMATS

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def parser() -> CommandParser:
    command = CommandParser(
        "vf-serve",
        "Serve a frozen causal language model for rollouts, over OpenAI's chat completions.",
        examples=(
            "vf-serve --model runs/demo-tiny/start",
            "vf-serve --model OWNER/NAME --port 0 --port-file port.txt",
        ),
        version=__version__,
    )
    add = command.group("model")
    add("--model", required=True, metavar="MODEL", help="model directory, or OWNER/NAME on the hub (required)")
    add(
        "--served-model-name",
        metavar="NAME",
        help="name of the model in requests (default: the directory's name, or OWNER/NAME)",
    )
    add("--device", choices=("cpu", "cuda", "auto"), default="auto", help="where the model runs")
    add("--dtype", choices=("float32", "bfloat16", "auto"), default="auto", help="auto: float32 on the CPU")
    add("--max-model-len", type=_positive, metavar="N", help="context in tokens (default: the model's)")
    add(
        "--max-images",
        type=_not_negative,
        default=0,
        metavar="N",
        help="most images in a prompt; with 0 a multimodal model is loaded without its tower",
    )
    add(
        "--tool-call-parser",
        choices=("auto", "none", *FORMATS),
        default="auto",
        help="how the model writes tool calls; auto reads it off the chat template",
    )
    add(
        "--reasoning-parser",
        choices=("none", "think"),
        default="none",
        help="think: text between <think> tags is answered as reasoning_content",
    )
    add("--seed", type=int, metavar="N", help="sampling seed of requests that bring none (default: random)")
    add = command.group("address")
    add("--host", default="127.0.0.1", help="address to bind")
    add("--port", type=int, default=8000, metavar="N", help="port to bind; 0 picks a free one")
    add("--port-file", type=Path, metavar="FILE", help="file to write the port to once the server listens")
    add(
        "--api-key-var",
        metavar="VAR",
        help="environment variable that holds the key which every request must bring (default: no key)",
    )
    add("--max-body-mib", type=_positive, default=64, metavar="N", help="longest request body")
    add = command.group("speed")
    add(
        "--rollout-chunk-size",
        type=_positive,
        metavar="N",
        help="most sequences at once; others queue (default: 256 on a GPU, 64 on a CPU)",
    )
    add(
        "--kv-cache-mib",
        type=_positive,
        metavar="N",
        help="most memory for keys and values of running sequences; further requests queue (default: half of what "
        "is free once the model is loaded)",
    )
    add(
        "--prefix-cache-mib",
        type=_not_negative,
        default=256,
        metavar="N",
        help="memory for keys and values of finished sequences: a next turn computes only what is new",
    )
    add(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="replay passes of one token a sequence as CUDA graphs (default: on a GPU, unless layers have a state)",
    )
    add("--threads", type=_positive, metavar="N", help="CPU threads for torch (default: torch's choice)")
    add = command.group("process")
    add("--parent-pid", type=_positive, metavar="PID", help="end when this process ends")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="warning", help="least level to log")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM (exit code 0) or Ctrl-C (130); a start that fails gives 1 or 2 and a sentence."""
    arguments = parser().parse_args(argv)
    # Python looks for garbage as it ends: a second, with torch
    atexit.register(gc.freeze)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.parent_pid is not None:
        follow_parent(arguments.parent_pid)
    set_environment(arguments.threads)
    try:
        # a SIGTERM while the model loads is a normal end, too
        with exits_on_sigterm():
            return _serve(arguments)
    except StartError as error:
        print(f"vf-serve: {error}", file=sys.stderr)
        return error.exit_code
    except ConfigError as error:
        print(f"vf-serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _serve(arguments: argparse.Namespace) -> int:
    """Find out what cannot work before torch is imported, which takes seconds."""
    model = Path(arguments.model)
    on_hub = not model.is_dir() and _HUB_NAME.fullmatch(arguments.model) is not None
    if not (on_hub or model.is_dir()):
        raise StartError(
            f"--model {arguments.model!r} is not a directory, nor OWNER/NAME of a model on the hub; "
            "give the folder with config.json"
        )
    if arguments.port_file is not None:
        # A parent that finds the file must be able to trust it.
        arguments.port_file.unlink(missing_ok=True)
    with bind(arguments.host, arguments.port) as listener:
        if on_hub:
            model = _from_hub(arguments.model)
        from verifiers_embedded.serving import serve

        name = arguments.served_model_name or (arguments.model if on_hub else model.resolve().name)
        return serve(arguments, model, name, _api_key(arguments.api_key_var), listener)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise StartError(f"--api-key-var {variable}: the environment has no such variable, or it is empty; set it")
    return key


def set_environment(threads: int | None) -> None:
    """Make OpenMP sleep, not spin, between steps; it reads this once, when torch is first imported.

    A spinning team takes the cores from the trainer beside it: its steps become several times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is not a whole number of at least 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a whole number of at least 1")
    return value


def _from_hub(name: str) -> Path:
    """Return the directory of a model that is downloaded, unless the local cache has it already."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        # the network, the hub and the cache each fail in their own ways
        reason = str(error).strip().splitlines() or [""]
        raise StartError(
            f"--model {name!r} is not a directory here, and cannot be had from the hub "
            f"({type(error).__name__}: {reason[0]}); give a directory, or check the name and the network",
            1,
        ) from error
