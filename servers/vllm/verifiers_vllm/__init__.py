"""vLLM's OpenAI server, started the way training needs it. Imports neither vLLM nor torch."""

from __future__ import annotations

__version__ = "0.1.0"
