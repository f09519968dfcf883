"""Classic import path of `verifiers.parsers.messages`."""

from verifiers.parsers.messages import (
    cleanup_message,
    cleanup_messages,
    message_to_printable,
    messages_to_printable,
    sanitize_tool_calls,
)

__all__ = [
    "cleanup_message",
    "cleanup_messages",
    "message_to_printable",
    "messages_to_printable",
    "sanitize_tool_calls",
]
