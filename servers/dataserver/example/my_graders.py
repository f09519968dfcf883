"""A grader of one's own: it runs in a sandboxed process for each completion."""


def brevity(parsed: str, most_words: int = 3) -> float:
    """Return 1 for an answer of at most `most_words` words, less for a longer one."""
    return min(1.0, most_words / max(1, len(parsed.split())))
