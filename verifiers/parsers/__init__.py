"""Parsers: from a completion's text to an answer."""

from __future__ import annotations

from verifiers.parsers.parser import MaybeThinkParser, Parser, ThinkParser
from verifiers.parsers.xml_parser import XMLParser

__all__ = ["MaybeThinkParser", "Parser", "ThinkParser", "XMLParser"]
