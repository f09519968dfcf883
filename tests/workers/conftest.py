"""Environments in a module that workers can import, and workers in the test's own event loop."""

from __future__ import annotations

import sys
from pathlib import Path

# test modules are imported without a package (import mode importlib), so what they share is found by path
sys.path.insert(0, str(Path(__file__).parent))
