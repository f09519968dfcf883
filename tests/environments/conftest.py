"""The packages under environments/ are importable here whether they are installed or not."""

from __future__ import annotations

import sys

import shelf

sys.path.extend(str(shelf.ENVIRONMENTS / name) for name in shelf.names())
