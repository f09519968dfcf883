"""The server's process: ``vllm serve``, ended with its engine processes when vf-vllm is gone.

Run by vf-vllm as ``python -m verifiers_vllm.served MODEL ...``; of no use alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from verifiers_vllm.supervision import SUPERVISOR_VARIABLE

_POLL_S = 0.25


def follow(supervisor: int) -> None:
    """End this process group as soon as process `supervisor` is not this one's parent any more."""

    def watch() -> None:
        while os.getppid() == supervisor:
            time.sleep(_POLL_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="vf-supervisor-watch", daemon=True).start()


def main() -> None:
    """Run ``vllm serve`` with this process's arguments."""
    # taken out: engine processes inherit the environment, and are not the supervisor's children
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, "")
    if supervisor:
        follow(int(supervisor))
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
