"""Property tests draw the same examples in every run, keep no files, and are not hurried on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same-each-time", deadline=None, derandomize=True, database=None)
settings.load_profile("same-each-time")
