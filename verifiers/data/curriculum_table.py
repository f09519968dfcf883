"""Any kind of curriculum from a table of a file: stages, levels or pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from verifiers.data.adaptive import Adapts
from verifiers.data.curriculum import Curriculum, curriculum_from
from verifiers.data.levels import Levels
from verifiers.data.pools import PassRatePools, Pool
from verifiers.errors import ConfigError

__all__ = ["curriculum_or_rule_from"]

RULES: Mapping[str, type[Levels] | type[PassRatePools]] = {"levels": Levels, "pools": PassRatePools}


def curriculum_or_rule_from(mapping: Mapping[str, Any], seed: int = 0) -> Curriculum | Adapts:
    """The curriculum that a table describes.

    Args:
        mapping: {"stages": ...} as for `curriculum_from`, or {"levels": {...}} with the arguments of `Levels`, or
            {"pools": {...}} with those of `PassRatePools`, whose pools are a list of {"name", "up_to", "weight"}.
        seed: where the table has none.

    Raises:
        ConfigError: not exactly one kind, a key that is unknown or missing, or a value that cannot be.
    """
    kinds = [kind for kind in ("stages", *RULES) if kind in mapping]
    if len(kinds) != 1:
        raise ConfigError(
            f"the curriculum has {' and '.join(kinds) or 'neither stages, levels nor pools'}; give one of stages, "
            "levels and pools."
        )
    kind = kinds[0]
    if kind == "stages":
        return curriculum_from({"seed": seed, **mapping})
    for key in mapping:
        if key not in (kind, "seed"):
            raise ConfigError(f"the curriculum has an unknown key {key!r} beside {kind!r}; it takes {kind} and seed.")
    given = _arguments(kind, RULES[kind], mapping[kind])
    if kind == "pools" and "pools" in given:
        given["pools"] = tuple(Pool(**_arguments("a pool", Pool, pool)) for pool in given["pools"])
    given["seed"] = mapping.get("seed", seed)
    if isinstance(given["seed"], bool) or not isinstance(given["seed"], int):
        raise ConfigError(f"seed of the curriculum is {given['seed']!r}; give a whole number.")
    rule: Adapts = RULES[kind](**given)
    return rule


def _arguments(where: str, kind: type[Any], given: Any) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init and field.name != "seed"}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} of the curriculum is {given!r}; give a table with {', '.join(fields)}.")
    for key, value in given.items():
        if key not in fields:
            raise ConfigError(f"{where} of the curriculum has an unknown key {key!r}; it takes {', '.join(fields)}.")
        if key in ("datasets", "pools") and not isinstance(value, list):
            raise ConfigError(f"{key} of the curriculum's {where} is {value!r}; give a list.")
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in given:
            raise ConfigError(f"{where} of the curriculum has no {name!r}; it takes {', '.join(fields)}.")
    return dict(given)
