"""The packages under environments/ are importable here whether they are installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

# test modules are imported without a package (import mode importlib), so what they share is found by path
sys.path.insert(0, str(Path(__file__).parent))

import shelf

sys.path.extend(str(shelf.ENVIRONMENTS / name) for name in shelf.names())
