"""The embedded server; what it generates is answered `VERIFIERS_BENCHMARK_LATENCY_S` later, as from far away."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from aiohttp import web
from verifiers_embedded.cli import main
from verifiers_embedded.routes import app

LATENCY_S = float(os.environ["VERIFIERS_BENCHMARK_LATENCY_S"])


@web.middleware
async def far_away(request: web.Request, handler: Any) -> web.StreamResponse:
    """Delay what was generated; the delay costs no CPU and holds no slot."""
    answer: web.StreamResponse = await handler(request)
    if request.path in ("/v1/chat/completions", "/inference/v1/generate"):
        await asyncio.sleep(LATENCY_S)
    return answer


if __name__ == "__main__":
    near = app.Routes.app

    def routes(self: app.Routes) -> web.Application:
        made = near(self)
        made.middlewares.append(far_away)
        return made

    app.Routes.app = routes  # type: ignore[method-assign]
    sys.exit(main())
