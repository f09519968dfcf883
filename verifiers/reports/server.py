"""A folder of runs over HTTP on loopback: a list, each run's page, two evaluations side by side; all of it read-only.

The page of a run asks for what was added since, so a run can be watched while it is in progress. Runs are for the
person at this machine: the server listens on a loopback address alone and answers no foreign web page.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from verifiers.errors import ConfigError
from verifiers.evals.results import RolloutResults
from verifiers.evals.store import RESULTS, finite, read_metadata
from verifiers.http_requests import app_runner
from verifiers.monitoring.history import eval_set_label, is_trained_on
from verifiers.monitoring.number_text import rounded
from verifiers.monitoring.run_log import METRICS, is_training_run, read_run
from verifiers.reports.evaluation import (
    ROWS_PER_BLOCK,
    Entry,
    columns_of,
    comparison_text,
    entry_of,
    run_name,
    shown_row,
    summary_of,
    transcripts,
)
from verifiers.reports.page import json_text, page_text, plain_page
from verifiers.reports.training_run import run_version, started_at, training_data, training_page
from verifiers.server_process import bind

if TYPE_CHECKING:
    from verifiers.http_requests import Handler

HOST = "127.0.0.1"
_CLOSING_S = 0.5
_DEEPEST = 4
_CHUNK_BYTES = 8 << 20
_TAIL_BYTES = 64 << 10
_CELL_CHARACTERS = 100
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class RunServer:
    """A server of the runs under a folder: `await start()`, then `url`, then `await close()`.

    Routes, all of them GET: `/` (the list), `/run/<path>/` (a page), `/run/<path>/rows?from=N` and
    `/run/<path>/block/<n>` (for the page of an evaluation), `/run/<path>/training?known=VERSION` (for that of a
    training run), `/compare?run=<path>&run=<path>`. A path is looked up among the runs that were found under the
    folder; no other file is ever opened.

    Args:
        root: folder of run directories, at most four levels down, or a run directory itself.
        port: default 0 takes a free one.
    """

    def __init__(self, root: Path, port: int = 0) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise ConfigError(f"{str(root)!r} is not a directory; give the folder that holds the runs.")
        self.port = port
        self._runner: web.AppRunner | None = None
        self._opened: dict[str, GrowingRun] = {}
        # one reader at a time: what a run has read so far is shared between requests
        self._reading = asyncio.Lock()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    async def start(self) -> None:
        """Listen. Raises ConfigError where the port is taken."""
        app = web.Application(middlewares=[_guarded])
        app.router.add_get("/", self._list)
        app.router.add_get("/compare", self._compare)
        app.router.add_get("/run/{run:.+}/rows", self._rows)
        app.router.add_get(r"/run/{run:.+}/block/{number:\d{1,9}}", self._block)
        app.router.add_get("/run/{run:.+}/training", self._training)
        app.router.add_get("/run/{run:.+}/", self._page)
        listener = bind(HOST, self.port)
        self.port = listener.getsockname()[1]
        self._runner = app_runner(app, self._is_own_host, handle_signals=False, shutdown_timeout=_CLOSING_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        """Stop listening; does nothing the second time."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _is_own_host(self, host: str) -> bool:
        return host in (f"{HOST}:{self.port}", f"localhost:{self.port}")

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return _html(await asyncio.to_thread(_list_text, self.root))

    async def _compare(self, request: web.Request) -> web.StreamResponse:
        chosen = set(request.query.getall("run", []))
        if len(chosen) != 2:
            return _html(_notice_text(f"Two runs are compared; {len(chosen)} were chosen."), status=400)
        found = list(await asyncio.to_thread(find_runs, self.root))
        # they are found newest first, and what is older is compared against
        after, before = [await self._directory(key) for key in sorted(chosen, key=[*found, *chosen].index)]
        return _html(await asyncio.to_thread(comparison_text, before, after, home="/"))

    async def _page(self, request: web.Request) -> web.StreamResponse:
        directory = await self._directory(request.match_info["run"])
        if is_training_run(directory):
            return _html(await asyncio.to_thread(training_page, directory, live=True))
        run = await self._run(request)
        async with self._reading:
            text = await asyncio.to_thread(_page_text, run)
        return _html(text)

    async def _training(self, request: web.Request) -> web.StreamResponse:
        directory = await self._directory(request.match_info["run"])
        if not is_training_run(directory):
            raise web.HTTPNotFound(text="This is not a training run.\n")
        if request.query.get("known") == run_version(directory):
            return web.Response(status=204)
        return _json(await asyncio.to_thread(training_data, directory))

    async def _rows(self, request: web.Request) -> web.StreamResponse:
        run = await self._run(request)
        start = request.query.get("from", "0")
        if not start.isdecimal() or len(start) > 9:
            return _html(_notice_text("?from= takes a number of rows."), status=400)
        async with self._reading:
            data = await asyncio.to_thread(_news, run, int(start))
        return _json(data)

    async def _block(self, request: web.Request) -> web.StreamResponse:
        run = await self._run(request)
        async with self._reading:
            text = await asyncio.to_thread(run.block, int(request.match_info["number"]))
        return web.Response(body=text.encode("utf-8", "backslashreplace"), content_type="application/json")

    async def _run(self, request: web.Request) -> GrowingRun:
        key = request.match_info["run"]
        directory = await self._directory(key)
        if not (directory / RESULTS).is_file():
            raise FileNotFoundError(f"{key!r} is not an evaluation")
        return self._opened.setdefault(key, GrowingRun(directory))

    async def _directory(self, key: str) -> Path:
        found = await asyncio.to_thread(find_runs, self.root)
        if key not in found:
            raise web.HTTPNotFound(text="There is no such run.\n")
        return found[key]


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(_HEADERS)
        raise
    except (OSError, ConfigError) as error:
        # runs can be deleted or damaged while they are looked at
        response = web.Response(status=404, text=f"{error}\n")
    response.headers.update(_HEADERS)
    return response


def _news(run: GrowingRun, start: int) -> dict[str, Any]:
    run.refresh()
    summary = run.summary()
    return {
        "epoch": run.epoch,
        "rows": len(run.entries),
        "total": summary["rollouts"],
        "run": summary,
        "columns": columns_of(run.entries[start:]),
    }


def _page_text(run: GrowingRun) -> str:
    news = _news(run, 0)
    summary = news.pop("run")
    data = {**news, "live": True, "home": "/", "runs": [summary], "difference": None, "rowsPerBlock": ROWS_PER_BLOCK}
    return page_text(summary["title"], data, live=True)


def _list_text(root: Path) -> str:
    rows = [_list_row(key, directory) for key, directory in find_runs(root).items()]
    name = html.escape(str(root))
    if not rows:
        return _notice_text(
            f"There are no runs under {root}; `vf-eval` writes to outputs/evals, `vf-train` to outputs."
        )
    columns = ("", "run", "kind", "environment", "model", "reward", "done", "started")
    head = "".join(f'<th scope="col">{text}</th>' for text in columns)
    return plain_page(
        f"runs in {root}",
        f'<main><h1>{name}</h1><form action="/compare" method="get"><div class="card"><table class="runs">'
        f"<caption>Newest first. Tick two evaluations to see them side by side: A is the older one, B the newer."
        f"</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f"<p><button>Compare</button></p></form></main>",
    )


def _list_row(key: str, directory: Path) -> str:
    shown, address = html.escape(key), f"/run/{urllib.parse.quote(key)}/"
    choice = ""
    try:
        if is_training_run(directory):
            known = _training_cells(directory)
        else:
            known = _evaluation_cells(directory)
            choice = f'<input type="checkbox" name="run" value="{shown}" aria-label="compare {shown}">'
    except Exception as error:
        # whatever one run holds, the others are shown
        known = [(f"damaged: {error}",), *[("",)] * 5]
    cells = [choice, f'<a href="{html.escape(address)}">{shown}</a>', *(_cell(*texts) for texts in known)]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _cell(text: object, below: str = "") -> str:
    note = f'<span class="soft">{html.escape(below[:_CELL_CHARACTERS])}</span>' if below else ""
    return html.escape(str(text)[:_CELL_CHARACTERS]) + note


def _evaluation_cells(directory: Path) -> list[tuple[str, ...]]:
    metadata = known_metadata(directory)
    numbers = _mapping(metadata, "summary")
    reward = _mapping(_mapping(numbers, "rewards"), "reward")
    mean, stderr, low, high = (finite(reward.get(name)) for name in ("mean", "stderr", "low", "high"))
    interval = "" if low is None else f"{rounded(low, stderr)} .. {rounded(high, stderr)}"
    done = f"{numbers['rollouts']} rollouts" if isinstance(numbers.get("rollouts"), int) else "not finished"
    started = str(metadata.get("started", ""))[:16].replace("T", " ")
    return [("evaluation",), *_names(metadata), (_reward(mean, stderr), interval), (done,), (started,)]


def _training_cells(directory: Path) -> list[tuple[str, ...]]:
    run, newest = read_run(directory), newest_metrics(directory)
    steps = f"{newest.get('step', 0)} of {run.get('max_steps', '?')} steps"
    done = (steps,) if run.get("status") == "finished" else (steps, str(run.get("status", "status unknown")))
    eval_reward, error = finite(newest.get("eval_reward")), finite(newest.get("eval_reward_stderr"))
    label = eval_set_label("eval_reward", trained_on=is_trained_on("eval_reward", newest))
    below = "" if eval_reward is None else f"{label} {_reward(eval_reward, error)}"
    below += f" ± {rounded(error, error)}" if below and error is not None else ""
    reward = (_reward(finite(newest.get("reward"))), below)
    return [("training",), *_names(run), reward, done, (started_at(run),)]


def _names(record: Mapping[str, Any]) -> tuple[tuple[str, str], tuple[str]]:
    """Return the cells of the environment, with its arguments, and of the model."""
    arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in _mapping(record, "env_args").items())
    return (str(record.get("env", "")), arguments), (str(record.get("model", "")),)


def _reward(mean: float | None, stderr: float | None = None) -> str:
    return "–" if mean is None else rounded(mean, stderr)


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def _notice_text(text: str) -> str:
    body = f'<main><p class="notice">{html.escape(text)}</p><p><a href="/">All runs</a></p></main>'
    return plain_page("vf-view", body)


def _html(text: str, status: int = 200) -> web.Response:
    body = text.encode("utf-8", "backslashreplace")
    return web.Response(body=body, status=status, content_type="text/html", charset="utf-8")


def _json(data: Any) -> web.Response:
    return web.Response(body=json_text(data).encode("utf-8", "backslashreplace"), content_type="application/json")


# -- run directories ------------------------------------------------------------------------------------------------


def known_metadata(directory: Path) -> dict[str, Any]:
    """Return what metadata.json holds; empty where it is missing or damaged, since the results can still be shown."""
    try:
        return read_metadata(directory)
    except (ConfigError, OSError):
        return {}


def find_runs(root: Path) -> dict[str, Path]:
    """Return the directories under `root` that hold an evaluation or a training run, by their path, newest first.

    Where `root` is a run itself, it has the name of its directory. Links that lead out of `root` are not followed.
    """
    real_root = root.resolve()
    found: list[tuple[float, str, Path]] = []
    for parent, names, _ in os.walk(root):
        path = Path(parent)
        depth = len(path.relative_to(root).parts)
        names[:] = [] if depth >= _DEEPEST else [name for name in names if not name.startswith(".")]
        # another user's may be listed and not read
        with contextlib.suppress(OSError):
            file = _record_of(path)
            if file is not None and file.resolve().is_relative_to(real_root):
                key = path.relative_to(root).as_posix() if depth else real_root.name or "run"
                found.append((-file.stat().st_mtime, key, path))
    return {key: path for _, key, path in sorted(found)}


def newest_metrics(directory: Path) -> dict[str, Any]:
    """Return the newest value of each metric of a training run, of its last lines alone."""
    with (directory / METRICS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    newest: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            newest.update(json.loads(line))
    return newest


def _record_of(directory: Path) -> Path | None:
    """Return the file that grows while a run is in progress; None where the directory holds no run."""
    if (directory / RESULTS).is_file():
        return directory / RESULTS
    return directory / METRICS if is_training_run(directory) else None


class GrowingRun:
    """A run that is read as it grows: each refresh reads what was appended since the last.

    Not for several threads at once. Only small values are kept; transcripts are read again from the file. `epoch`
    counts how often the file was replaced or cut, which makes row numbers mean something else.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entries: list[Entry] = []
        self.epoch = 0
        self._numbers = RolloutResults()
        self._offset = 0
        self._file_id: tuple[int, int] | None = None
        self._summary: tuple[int, int, dict[str, Any], dict[str, Any]] | None = None

    def refresh(self) -> int:
        """Read what is new; the number of rows now. A last line without its end waits for the next time.

        Raises:
            OSError: the file is gone.
        """
        with (self.directory / RESULTS).open("rb") as file:
            status = os.fstat(file.fileno())
            file_id = (status.st_dev, status.st_ino)
            if self._file_id not in (None, file_id) or status.st_size < self._offset:
                self.entries, self._offset, self.epoch = [], 0, self.epoch + 1
                self._numbers = RolloutResults()
            self._file_id = file_id
            file.seek(self._offset)
            while lines := file.readlines(_CHUNK_BYTES):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return len(self.entries)
                    row = shown_row(line)
                    if row is not None:
                        self.entries.append(entry_of(row, offset=self._offset))
                        self._numbers.add(self.entries[-1].counted())
                    self._offset += len(line)
        return len(self.entries)

    def summary(self) -> dict[str, Any]:
        """Return the run's numbers as of the last refresh; computed again only where rows or metadata changed."""
        metadata = known_metadata(self.directory)
        if self._summary is None or self._summary[:3] != (self.epoch, len(self.entries), metadata):
            numbers = summary_of(self._numbers, metadata, run_name(self.directory))
            self._summary = (self.epoch, len(self.entries), metadata, numbers)
        return self._summary[3]

    def block(self, number: int) -> str:
        """Return the transcripts of the rows from `number * ROWS_PER_BLOCK` on as JSON; fewer at the end, or none."""
        start = number * ROWS_PER_BLOCK
        return transcripts([self.directory], self.entries[start : start + ROWS_PER_BLOCK])
