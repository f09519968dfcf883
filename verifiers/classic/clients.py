"""An openai client out of a configuration, as packages of the classic API make theirs for judges."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.types import ClientConfig

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["setup_client"]


def setup_client(config: ClientConfig | Mapping[str, Any] | Any = None, **settings: Any) -> AsyncOpenAI:
    """Return an `openai.AsyncOpenAI` for an endpoint, with the key that the environment has, or else "EMPTY".

    Args:
        config: a `ClientConfig`, or a mapping or object with fields of the same names.
        **settings: fields that win over those of `config`.

    Raises:
        ConfigError: a setting that there is not.
    """
    names = list(ClientConfig.__slots__)
    unknown = sorted({*settings, *(config if isinstance(config, Mapping) else ())} - set(names))
    if unknown:
        raise ConfigError(f"setup_client has no setting {unknown[0]!r}, only {', '.join(names)}.")
    given = config if isinstance(config, Mapping) else {name: getattr(config, name, None) for name in names}
    chosen = ClientConfig(**{name: value for name, value in {**given, **settings}.items() if value is not None})
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=chosen.api_base_url,
        api_key=os.environ.get(chosen.api_key_var, "").strip() or "EMPTY",
        timeout=chosen.timeout,
        max_retries=chosen.max_retries,
        default_headers=dict(chosen.extra_headers) or None,
    )
