"""Work of a process that was forked for one request: run a command, read or write a file, call a function.

Standard library only: this runs inside the sandbox.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import stat
from typing import Any

from verifiers.sandbox.confinement import Limits

MAX_RESULT_BYTES = 16 << 20
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
# rm goes deeper than Python may recurse; it needs help only where rights were taken from directories
_REMOVE = 'exec 2>/dev/null; rm -rf "$0" || { chmod -R u+rwx "$0"; rm -rf "$0"; }'


def say(text: str) -> None:
    try:
        os.write(2, text.encode(errors="replace"))
    except OSError:
        pass


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def execute(command: str | list[str], environment: dict[str, str]) -> None:
    """Replace this process by a command, or end it as a shell would where there is no such command."""
    if isinstance(command, str):
        shell = next((path for path in _SHELLS if os.access(path, os.X_OK)), _SHELLS[-1])
        command = [shell, "-c", command]
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _open(path: str, limits: Limits, flags: int, contained: bool) -> int:
    """Open a regular file. Unless `contained`, no path and no link may lead out of the sandbox's directory."""
    whole = os.path.join(limits.directory, path)
    directory = os.path.realpath(limits.directory)
    if not contained and os.path.commonpath([directory, os.path.realpath(whole)]) != directory:
        raise PermissionError(errno.EACCES, "the path leads out of the sandbox's directory")
    if flags & os.O_WRONLY:
        os.makedirs(os.path.dirname(whole), exist_ok=True)
    # O_NONBLOCK: opening a named pipe must not wait for its other end
    fd = os.open(whole, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number))
    return fd


def read_file(request: dict[str, Any], limits: Limits, contained: bool) -> None:
    fd = _open(request["path"], limits, os.O_RDONLY, contained)
    left = request["max_bytes"]
    while data := os.read(fd, 1 << 16):
        left -= len(data)
        if left < 0:
            raise OSError(errno.EFBIG, f"the file is longer than {request['max_bytes']} bytes")
        _write_all(1, data)


def write_file(request: dict[str, Any], limits: Limits, contained: bool) -> None:
    fd = _open(request["path"], limits, os.O_WRONLY | os.O_CREAT, contained)
    # only now: a special file would have been truncated before it was looked at
    os.ftruncate(fd, 0)
    while data := os.read(0, 1 << 16):
        _write_all(fd, data)


def _answer(request: dict[str, Any]) -> bytes:
    try:
        module, _, path = request["function"].partition(":")
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:
        return json.dumps({"missing": f"{type(error).__name__}: {error}"}).encode()
    try:
        value = found(*request["args"], **request["kwargs"])
        data = json.dumps({"value": value}).encode()
    # also SystemExit and KeyboardInterrupt: the process ends here, and its caller has to be told why
    except BaseException as error:
        return json.dumps({"kind": type(error).__name__, "message": str(error)[:2000]}).encode()
    if len(data) > MAX_RESULT_BYTES:
        message = f"its result is {len(data)} bytes of JSON, over the limit of {MAX_RESULT_BYTES}"
        return json.dumps({"kind": "OverflowError", "message": message}).encode()
    return data


def answer_call(request: dict[str, Any], out: int) -> None:
    """Call a function and write what came of it, as JSON, to a descriptor."""
    _write_all(out, _answer(request))


def remove_tree(path: str) -> None:
    """Remove a directory with all it holds, however deep and with whatever rights. Nothing may be writing to it."""
    try:
        for entry in os.listdir(path):
            os.unlink(os.path.join(path, entry))
        os.rmdir(path)
    except OSError:
        # there are directories in it
        os.spawnlp(os.P_WAIT, "sh", "sh", "-c", _REMOVE, path)
