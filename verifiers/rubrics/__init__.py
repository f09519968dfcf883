"""Rubrics: from rollouts to rewards."""

from __future__ import annotations

from verifiers.rubrics.rubric import Rubric

__all__ = ["Rubric"]
