"""A folder of runs over HTTP on loopback: a list, each run's page, two runs side by side; nothing can be written.

The pages of a run ask for rows that came in since, so a run can be watched while it goes on. What runs hold is for
the person at this machine: only loopback addresses are listened on, and a request whose Host header names anything
but this server is refused, which keeps web pages from elsewhere from reading it through DNS rebinding.
"""

from __future__ import annotations

import asyncio
import html
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.evals.viewer.data import ROWS_PER_BLOCK, columns_of
from verifiers.evals.viewer.page import page_text, plain_page
from verifiers.evals.viewer.runs import GrowingRun, find_runs, known_metadata
from verifiers.evals.viewer.writing import comparison_text

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["HOST", "RunServer"]

HOST = "127.0.0.1"
_CLOSING_S = 0.5
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


class RunServer:
    """Serves the runs under a folder: `await start()`, then `url`, then `await close()`.

    Routes, all of them GET: `/` (the list), `/run/<path>/` (a page), `/run/<path>/rows?from=N` and
    `/run/<path>/block/<n>` (what the page asks for), `/compare?run=<path>&run=<path>`. A path is looked up among the
    runs that were found under the folder; no other file is ever opened.

    Args:
        root: folder of run directories, at most four levels down, or a run directory itself.
        port: default 0 takes a free one.

    Raises:
        ConfigError: `root` is no directory.
    """

    def __init__(self, root: Path, port: int = 0) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise ConfigError(f"{str(root)!r} is no directory; give the folder that holds the runs.")
        self.port = port
        self._runner: web.AppRunner | None = None
        self._opened: dict[str, GrowingRun] = {}
        # one reader at a time: what a run has read so far is shared between requests
        self._reading = asyncio.Lock()

    @property
    def url(self) -> str:
        """Address of the list."""
        return f"http://{HOST}:{self.port}/"

    async def start(self) -> None:
        """Listen. Raises ConfigError where the port is taken."""
        from aiohttp import web

        @web.middleware
        async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(middlewares=[guard])
        app.router.add_get("/", self._list)
        app.router.add_get("/compare", self._compare)
        app.router.add_get("/run/{run:.+}/rows", self._rows)
        app.router.add_get(r"/run/{run:.+}/block/{number:\d{1,9}}", self._block)
        app.router.add_get("/run/{run:.+}/", self._page)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSING_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, self.port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"port {self.port} cannot be listened on ({error}); give another, or 0.") from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening; does nothing the second time."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        from aiohttp import web

        if request.headers.get("Host", "") not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
            return web.Response(status=403, text=f"This server answers for {HOST}:{self.port} alone.\n")
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

    async def _list(self, request: web.Request) -> web.StreamResponse:
        text = await asyncio.to_thread(_list_text, self.root)
        return _html(text)

    async def _compare(self, request: web.Request) -> web.StreamResponse:
        chosen = set(request.query.getall("run", []))
        if len(chosen) != 2:
            return _html(_notice_text(f"Two runs are compared; {len(chosen)} were chosen."), status=400)
        found = list(await asyncio.to_thread(find_runs, self.root))
        # they are found newest first, and what is older is compared against
        after, before = [await self._directory(key) for key in sorted(chosen, key=[*found, *chosen].index)]
        return _html(await asyncio.to_thread(comparison_text, before, after))

    async def _page(self, request: web.Request) -> web.StreamResponse:
        run = await self._run(request)
        async with self._reading:
            text = await asyncio.to_thread(_page_text, run)
        return _html(text)

    async def _rows(self, request: web.Request) -> web.StreamResponse:
        run = await self._run(request)
        start = request.query.get("from", "0")
        if not start.isdecimal() or len(start) > 9:
            return _html(_notice_text("?from= takes a number of rows."), status=400)
        async with self._reading:
            data = await asyncio.to_thread(_news, run, int(start))
        return _json(data)

    async def _block(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        run = await self._run(request)
        async with self._reading:
            text = await asyncio.to_thread(run.block, int(request.match_info["number"]))
        return web.Response(body=text.encode("utf-8", "backslashreplace"), content_type="application/json")

    async def _run(self, request: web.Request) -> GrowingRun:
        key = request.match_info["run"]
        directory = await self._directory(key)
        return self._opened.setdefault(key, GrowingRun(directory))

    async def _directory(self, key: str) -> Path:
        from aiohttp import web

        found = await asyncio.to_thread(find_runs, self.root)
        if key not in found:
            raise web.HTTPNotFound(text="There is no such run.\n")
        return found[key]


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
    data = {**news, "live": True, "runs": [summary], "difference": None, "rowsPerBlock": ROWS_PER_BLOCK}
    return page_text(summary["title"], data, live=True)


def _list_text(root: Path) -> str:
    rows = [_list_row(key, directory) for key, directory in find_runs(root).items()]
    name = html.escape(str(root))
    if not rows:
        return _notice_text(f"There are no runs under {root}; `vf-eval` writes them to outputs/evals.")
    columns = ("", "run", "environment", "model", "reward", "rollouts", "started")
    head = "".join(f'<th scope="col">{text}</th>' for text in columns)
    return plain_page(
        f"runs in {root}",
        f'<main><h1>{name}</h1><form action="/compare" method="get"><div class="card"><table>'
        f"<caption>Newest first. Tick two to see them side by side: A is the older one, B the newer.</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f"<p><button>Compare</button></p></form></main>",
    )


def _list_row(key: str, directory: Path) -> str:
    metadata = known_metadata(directory)
    summary = metadata.get("summary")
    numbers = summary if isinstance(summary, dict) else {}
    rewards = numbers.get("rewards")
    reward = rewards.get("reward") if isinstance(rewards, dict) else None
    mean = reward.get("mean") if isinstance(reward, dict) else None
    shown, address = html.escape(key), f"/run/{urllib.parse.quote(key)}/"
    cells = [
        f'<input type="checkbox" name="run" value="{html.escape(key)}" aria-label="compare {shown}">',
        f'<a href="{html.escape(address)}">{shown}</a>',
        html.escape(str(metadata.get("env", ""))[:100]),
        html.escape(str(metadata.get("model", ""))[:100]),
        f"{mean:.3f}" if isinstance(mean, (int, float)) else "–",
        str(numbers["rollouts"]) if isinstance(numbers.get("rollouts"), int) else "not finished",
        html.escape(str(metadata.get("started", ""))[:40]),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _notice_text(text: str) -> str:
    body = f'<main><p class="notice">{html.escape(text)}</p><p><a href="/">All runs</a></p></main>'
    return plain_page("vf-view", body)


def _html(text: str, status: int = 200) -> web.Response:
    from aiohttp import web

    body = text.encode("utf-8", "backslashreplace")
    return web.Response(body=body, status=status, content_type="text/html", charset="utf-8")


def _json(data: Any) -> web.Response:
    from aiohttp import web

    from verifiers.evals.viewer.data import json_text

    return web.Response(body=json_text(data).encode("utf-8", "backslashreplace"), content_type="application/json")
