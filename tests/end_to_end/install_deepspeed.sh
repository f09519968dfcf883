#!/usr/bin/env bash
# Makes an environment with deepspeed on top of that of $PYTHON (python), which stays as it is. Then:
#
#     VERIFIERS_DEEPSPEED_PYTHON=DIRECTORY/bin/python pytest -m slow tests/end_to_end/test_sharded.py
#
# The first run compiles deepspeed's collectives for the CPU, which takes a minute and needs a C++ compiler.
set -euo pipefail
directory=${1:-.venv-deepspeed}
python=${PYTHON:-python}
below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -m venv "$directory"
own=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" > "$own/below.pth"
"$directory/bin/python" -m pip install --quiet setuptools wheel einops hjson msgpack ninja psutil py-cpuinfo
# without its requirements, of which torch is one: the one below is used
DS_BUILD_OPS=0 "$directory/bin/python" -m pip install --quiet --no-build-isolation --no-deps deepspeed==0.19.8
DS_ACCELERATOR=cpu "$directory/bin/python" -c 'import deepspeed, verifiers; print("deepspeed", deepspeed.__version__)'
