"""An MCP server for tests, as a script over stdio or served over HTTP: arithmetic, a counter, misbehaviour."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

if __name__ == "__main__" and "--die" in sys.argv:
    sys.exit("no licence found")
if __name__ == "__main__" and "--pid-file" in sys.argv:
    # before the slow import, so that a server that is killed at its start is known too
    with open(sys.argv[sys.argv.index("--pid-file") + 1], "a") as pids:
        pids.write(f"{os.getpid()}\n")

from mcp import MCPError
from mcp.server import MCPServer


def build(name: str = "tools") -> MCPServer[Any]:
    """Build the server; `count` keeps state as long as the server lives."""
    server: MCPServer[Any] = MCPServer(name, log_level="ERROR")
    counter = {"value": 0}
    present, all_are_here = [0], asyncio.Event()

    @server.tool(description="Add two numbers.", structured_output=False)
    def add(a: int, b: int) -> str:
        return str(a + b)

    @server.tool(description="Counts its calls.", structured_output=False)
    def count() -> str:
        counter["value"] += 1
        return str(counter["value"])

    @server.tool(description="A structured result.")
    def point() -> dict[str, int]:
        return {"x": 1, "y": 2}

    @server.tool(description="Several parts.", structured_output=False)
    def parts() -> list[str]:
        return ["one", "two"]

    @server.tool(description="Always fails.", structured_output=False)
    def fail() -> str:
        raise ValueError("it is broken")

    @server.tool(description="Finds nothing.", structured_output=False)
    def find(text: str) -> str:
        raise MCPError(-32000, f"Not Found: {text}")

    @server.tool(description="Waits.", structured_output=False)
    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"

    @server.tool(description="Waits until so many calls are here.", structured_output=False)
    async def meet(parties: int) -> str:
        present[0] += 1
        if present[0] == parties:
            all_are_here.set()
        await all_are_here.wait()
        return "met"

    @server.tool(description="The process's environment.", structured_output=False)
    def environ() -> str:
        return "\n".join(f"{key}={value}" for key, value in os.environ.items())

    @server.tool(description="The process's number.", structured_output=False)
    def pid() -> str:
        return str(os.getpid())

    @server.tool(description="A long text.", structured_output=False)
    def long(length: int) -> str:
        return "x" * length

    @server.tool(description="Answers with its argument.", structured_output=False)
    def echo(text: str) -> str:
        return text

    @server.tool(description="Prints what is not UTF-8.", structured_output=False)
    def garble() -> str:
        os.write(1, b"caf\xe9\n")
        return "printed"

    return server


if __name__ == "__main__":
    if "--sleep" in sys.argv:
        time.sleep(60)
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    build().run("stdio")
    if "--stubborn" in sys.argv:
        time.sleep(60)
