"""The interpreter inside the sandbox, which executes code as a notebook does its cells. Standard library only.

Started as `python -I -c <the text of this file> <characters of output to keep>`. It takes one request a line on what
was its stdin (a nonce, a space, the code) and answers each with one line on what was its stdout (the nonce, a space,
the output), with code and output in the codec unicode_escape, which leaves no line break. Both streams are moved to
private descriptors before user code runs: descriptors 1 and 2 are a file that is read after each cell, and 0 is
empty. Code that finds the private descriptors can break the conversation, but not answer in its place without the
nonce of the request at hand. Code that digs the nonce out of this process can forge no more than its own output.

It starts thousands of times, so it imports little: json, tempfile, traceback and ast would take longer to load than
Python itself takes to start.
"""

from __future__ import annotations

import _ast
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType
    from typing import Any

CODEC = "unicode_escape"
TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80  # inspect.CO_COROUTINE


class Driver:
    """One interpreter and its namespace, kept from cell to cell."""

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self.pid = os.getpid()
        self.requests = os.fdopen(os.dup(0), "rb")
        self.replies = os.dup(1)
        self.empty = os.open(os.devnull, os.O_RDONLY)
        path = os.path.join(os.environ.get("TMPDIR") or os.getcwd(), f"output-{os.urandom(8).hex()}")
        # appending, since both descriptors and all child processes share it
        self.captured = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        os.unlink(path)
        # a module of its own under the usual name, so that pickle and dataclasses find what cells define
        self.own_module = sys.modules["__main__"]
        sys.modules["__main__"] = type(sys)("__main__")
        self.namespace = sys.modules["__main__"].__dict__
        sys.argv, sys.path[:0] = [""], [os.getcwd()]
        self.sources: list[str] = []
        self.unwritten = ""
        self.loop: Any = None

    def serve(self) -> None:
        self.open_streams()
        self.reply(b"ready", "")
        for line in self.requests:
            nonce, _, code = line.rstrip(b"\n").partition(b" ")
            self.run(code.decode(CODEC))
            # before the file is emptied, or what had no room there would be written with the next cell's
            self.open_streams()
            self.reply(nonce, "\n".join(filter(None, (self.output(), self.unwritten))))
            self.unwritten = ""

    def open_streams(self) -> None:
        """Open the standard streams, whatever the cell before has done to them."""
        for number, source in enumerate((self.empty, self.captured, self.captured)):
            os.dup2(source, number)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )

    def run(self, code: str) -> None:
        self.sources.append(code)
        status = 0
        try:
            for part in compiled(code, f"<cell {len(self.sources)}>"):
                value = self.execute(part)
                if value is not None:
                    self.namespace["_"] = value
                    print(repr(value))
        except BaseException as error:  # whatever a cell raises is its answer
            status = 1
            if not (os.getpid() != self.pid and isinstance(error, SystemExit)):
                self.print_error(error)
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except Exception:
                    continue
            if os.getpid() != self.pid:
                # a fork that ran to the end of the cell must not become a second driver
                os._exit(status)

    def execute(self, part: CodeType) -> Any:
        value = eval(part, self.namespace)
        if not part.co_flags & COROUTINE:
            return value
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        return self.loop.run_until_complete(value)

    def output(self) -> str:
        """Return what was captured since the last call; where it is long, a mark stands in place of its middle."""
        size = os.fstat(self.captured).st_size
        # a character takes at most four bytes
        keep = 4 * self.max_chars
        if size <= 2 * keep:
            head, tail = os.pread(self.captured, size, 0).decode("utf-8", "replace"), ""
        else:
            head = os.pread(self.captured, keep, 0).decode("utf-8", "replace")
            tail = os.pread(self.captured, keep, size - keep).decode("utf-8", "replace")
        os.ftruncate(self.captured, 0)
        if size <= 2 * keep and len(head) <= self.max_chars:
            return head
        first = self.max_chars // 2
        begin, end = head[:first], (head + tail)[-(self.max_chars - first) :]
        left_out = size - len((begin + end).encode("utf-8", "replace"))
        return f"{begin}\n[... {left_out:,} bytes left out ...]\n{end}"

    def reply(self, nonce: bytes, output: str) -> None:
        data = nonce + b" " + output.encode(CODEC) + b"\n"
        while data:
            data = data[os.write(self.replies, data) :]

    def print_error(self, error: BaseException) -> None:
        """Print the traceback as the cell's author expects it: it begins in the cell, not in this file."""
        try:
            import linecache
            import traceback

            for number, code in enumerate(self.sources, 1):
                name = f"<cell {number}>"
                linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
            place = error.__traceback__
            while place is not None and not place.tb_frame.f_code.co_filename.startswith("<cell "):
                place = place.tb_next
            traceback.print_exception(type(error), error, place, file=sys.stderr)
        except BaseException as why:  # an exception may fail to print itself, or there is no memory or room to do so
            reason = f" (its traceback is lost: {why.strerror})" if type(why) is OSError else ""
            self.unwritten = f"{type(error).__name__}{reason}"


def compiled(code: str, name: str) -> Iterator[CodeType]:
    """Yield a cell's statements as one part, and its last expression as another."""
    tree: Any = compile(code, name, "exec", flags=_ast.PyCF_ONLY_AST | TOP_LEVEL_AWAIT, dont_inherit=True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    yield compile(tree, name, "exec", flags=TOP_LEVEL_AWAIT, dont_inherit=True)
    if last is not None:
        yield compile(_ast.Expression(last.value), name, "eval", flags=TOP_LEVEL_AWAIT, dont_inherit=True)


if __name__ == "__main__":
    Driver(int(sys.argv[1])).serve()
