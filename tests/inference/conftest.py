"""Test modules are imported without a package (import mode importlib), so what they share is found by path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
