"""The process that ends its parent where a signal arrived there and no Python code has handled it.

Run as a program, by its path and without the package; `signals.exit_if_signal_is_unhandled` starts it.
"""

import os
import select
import signal
import sys
import time

RUNS = b"\0"
"""Written every `TICK_S` seconds: Python code runs."""

IS_OVER = b"\1"

TICK_S = 1.0

_STACKS_WITHIN_S = 2.0
"""Seconds in which the stacks of all threads are printed."""


def watch(process: int, within_s: float, sentence: str) -> None:
    """End the parent process where a signal arrived and nothing shows within `within_s` that Python code runs."""
    deadline: float | None = None
    while os.getppid() == process:
        left_s = TICK_S if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            print(sentence, file=sys.stderr, flush=True)
            os.kill(process, signal.SIGQUIT)
            time.sleep(_STACKS_WITHIN_S)
            if os.getppid() == process:
                os.kill(process, signal.SIGKILL)
            return
        if not select.select([0], [], [], left_s)[0]:
            continue
        written = os.read(0, 1 << 16)
        if not written or IS_OVER in written:
            return
        if RUNS in written:
            deadline = None
        if written.rpartition(RUNS)[2]:
            deadline = deadline or time.monotonic() + within_s


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
