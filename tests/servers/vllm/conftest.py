"""verifiers_vllm is installed where vLLM is; its parts that need no vLLM are tested from the source tree."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "servers/vllm"))
