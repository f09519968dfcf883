"""What a check of an environment found: findings with how to mend each, and the numbers that they rest on."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One thing that is wrong, or that somebody should know.

    Attributes:
        kind: its name, such as "right-not-rewarded"; docs/guides/check.md has them all.
        severity: "error" for what trains or evaluates on nonsense, "warning" for what probably does, else "note".
        text: what is so, with values.
    """

    kind: str
    severity: Severity
    where: str
    text: str
    mend: str


@dataclass(slots=True)
class CheckReport:
    """Findings of a check, worst first, and numbers by part: "rows", "rewards" (of each of a group), "policy"."""

    env: str
    findings: list[CheckFinding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return all(found.severity != "error" for found in self.findings)

    def add(self, part: str, findings: Iterable[CheckFinding], numbers: dict[str, Any]) -> None:
        found = [*self.findings, *findings]
        self.findings = sorted(found, key=lambda one: SEVERITIES.index(one.severity))
        self.numbers[part] = numbers

    def as_json(self) -> dict[str, Any]:
        return {"env": self.env, "is_right": self.is_right, **asdict(self), "findings": [*map(asdict, self.findings)]}

    def lines(self) -> list[str]:
        """Return the report as text, one finding in two lines."""
        counts = ", ".join(f"{self._count(severity)} {severity}s" for severity in SEVERITIES)
        lines = [f"{self.env}: {counts}"]
        for one in self.findings:
            lines += [f"{one.severity:<8}{one.kind} ({one.where}): {one.text}", f"        {one.mend}"]
        return lines

    def html(self) -> str:
        """Return the body of a page with the findings and numbers; everything in it is escaped."""
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in asdict(one).values()) + "</tr>"
            for one in self.findings
        )
        heads = "".join(f"<th>{name}</th>" for name in ("kind", "severity", "where", "what is so", "how to mend it"))
        numbers = "".join(
            f"<h2>{html.escape(part)}</h2><pre>{html.escape(_listed(values))}</pre>"
            for part, values in self.numbers.items()
        )
        title = f"<h1>{html.escape(self.lines()[0])}</h1>"
        return f"{title}<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{numbers}"

    def _count(self, severity: Severity) -> int:
        return sum(one.severity == severity for one in self.findings)


def named_rows(numbers: Iterable[int], kind: str = "row") -> str:
    """Return row numbers as words: "rows 1, 2, 3 and 4 more"."""
    found = list(numbers)
    shown = ", ".join(map(str, found[:_SHOWN]))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{kind}{'s' if len(found) > 1 else ''} {shown}{more}"


def _listed(values: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in values.items())
