"""How full rollout servers are, as their own counts on /metrics say: vLLM's, and the embedded server's."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache_use",
    "vf_sequences_running": "running",
    "vf_sequences_waiting": "waiting",
    "vf_slots_used": "cache_use",
}
_LINE = re.compile(rf"^({'|'.join(_GAUGES)})(?:{{.*}})? (\d+(?:\.\d+)?(?:e[+-]?\d\d?)?)(?!\S)", re.MULTILINE)


@dataclass(slots=True)
class ServerLoad:
    """Sums over readings of servers' /metrics.

    Attributes:
        cache_use: share of its cache (vLLM) or its slots (embedded server) in use; the fullest engine's.
        busy: readings with any request.
        full: of these, readings with one that waited.
    """

    readings: int = 0
    running: float = 0.0
    waiting: float = 0.0
    cache_use: float = 0.0
    busy: int = 0
    full: int = 0

    def take(self, text: str) -> bool:
        """Add a reading in the text form of Prometheus; False where it has no such counts."""
        found: dict[str, list[float]] = {}
        for name, value in _LINE.findall(text):
            found.setdefault(_GAUGES[name], []).append(float(value))
        if not {"running", "waiting"} <= found.keys():
            return False
        running, waiting = sum(found["running"]), sum(found["waiting"])
        self.readings += 1
        self.running += running
        self.waiting += waiting
        self.cache_use += max(found.get("cache_use", [0.0]))
        self.busy += running + waiting > 0
        self.full += waiting > 0
        return True

    def metrics(self) -> dict[str, float]:
        """Return means over the readings, and the share of the busy ones in which requests waited; {} without any."""
        if not self.readings:
            return {}
        means = {name: getattr(self, name) / self.readings for name in ("running", "waiting", "cache_use")}
        full = {"full": self.full / self.busy} if self.busy else {}
        return {f"server/{name}": value for name, value in {**means, **full}.items()}
