"""What a command or a cell printed, as a policy reads it: of a stated length, with what happened said."""

from __future__ import annotations

from verifiers.sandbox.spec import RunResult

__all__ = ["result_text", "shortened"]


def shortened(text: str, max_chars: int) -> str:
    """The text, or its beginning and its end with a mark between them that says how much is missing."""
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    return f"{text[:head]}\n[... {len(text) - max_chars:,} characters left out ...]\n{text[len(text) - tail :]}"


def result_text(result: RunResult, max_chars: int, timeout_s: float) -> str:
    """A command's output, then its errors, then one line for each of: output lost, time over, exit code not 0."""
    parts = [result.stdout.rstrip("\n")]
    if result.stderr.strip():
        parts.append(f"stderr:\n{result.stderr.rstrip()}")
    text = shortened("\n".join(part for part in parts if part), max_chars)
    notes = []
    if result.dropped_bytes:
        notes.append(f"[{result.dropped_bytes:,} bytes of output were too many and are lost]")
    if result.timed_out:
        notes.append(f"[the command ran longer than {timeout_s:g} s and was killed]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    return "\n".join(part for part in (text, *notes) if part) or "[no output]"
