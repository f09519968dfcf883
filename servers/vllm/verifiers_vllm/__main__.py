"""``python -m verifiers_vllm``: the same as ``vf-vllm``."""

from __future__ import annotations

import sys

from verifiers_vllm.cli import main

sys.exit(main())
