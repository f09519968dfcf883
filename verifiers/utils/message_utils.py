"""Classic import path of `verifiers.parsers.messages`."""

from verifiers.parsers.messages import cleanup_messages, messages_to_printable, sanitize_tool_calls

__all__ = ["cleanup_messages", "messages_to_printable", "sanitize_tool_calls"]
