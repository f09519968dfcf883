"""A fake server in a process of its own, so that its work is not the measured side's.

With `--instant` it sends one prepared answer without looking at the request: what is measured is the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from verifiers.server_process import bind, follow_parent, write_port_file
from verifiers.testing import FakeOpenAIServer
from verifiers.testing.script import response_body


@contextlib.contextmanager
def server_process(answer: str, *flags: str) -> Iterator[str]:
    """Run the server while the block runs, and give its base URL."""
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        command = [sys.executable, __file__, answer, "--port-file", str(port_file), *flags]
        process = subprocess.Popen([*command, "--parent-pid", str(os.getpid())])
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended with {process.returncode} before it listened")
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}/v1"
        finally:
            process.terminate()
            process.wait()


async def _serve_instantly(text: str, port_file: Path) -> None:
    wanted = {"return_token_ids": True}
    chat = response_body({**wanted, "logprobs": True, "messages": []}, [text]) | {"prompt_token_ids": [1]}
    completion = response_body({**wanted, "logprobs": 0, "prompt": [1]}, [text])
    bodies = [json.dumps(body).encode() for body in (completion, chat)]

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=bodies[request.path.endswith("/chat/completions")], content_type="application/json")

    # no router and no application
    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    listening = bind("127.0.0.1", 0)
    await web.SockSite(runner, listening, backlog=4096).start()
    write_port_file(port_file, listening)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answer")
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--instant", action="store_true")
    args = parser.parse_args()
    follow_parent(args.parent_pid)
    if args.instant:
        asyncio.run(_serve_instantly(args.answer, args.port_file))
    with FakeOpenAIServer(args.answer) as server:
        partial = args.port_file.with_name("partial")
        partial.write_text(f"{server.port}\n")
        partial.replace(args.port_file)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
