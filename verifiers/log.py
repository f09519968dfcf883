"""Logging of the package, for programs that have no logging set up of their own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit


def setup_logging(level: int | str = "INFO", log_format: str | None = None, date_format: str | None = None) -> None:
    """Send the package's log to standard error. Other libraries' loggers and the root logger stay as they are.

    Calling it again replaces what the earlier call set.

    Args:
        level: a level's name or number.
        log_format: as in `logging.Formatter`.
        date_format: as in `logging.Formatter`.

    Raises:
        ValueError: an unknown level.
    """
    logger = logging.getLogger("verifiers")
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            log_format or "%(asctime)s %(levelname)s %(name)s: %(message)s", date_format or "%Y-%m-%d %H:%M:%S"
        )
    )
    logger.handlers[:] = [handler]
    # the handler above already prints it; a root handler would print it twice
    logger.propagate = False


REDACTED = "***"
_SHORTEST = 8  # shorter keys are placeholders such as EMPTY, and shorter texts stand everywhere
_SHORTEST_ELSEWHERE = 16
_NEVER_SECRET = frozenset(
    ("outcome", "role", "finish_reason", "stop_reason", "type", "kind", "status", "task", "env", "model", "name")
)
_WORDS = re.compile(r"[a-z]+([ _-][a-z]+)*", re.IGNORECASE)
_LONGEST_WORDS = 20
_SECRET_NAME = re.compile(
    r"(key|token|secret|password|passwd|authorization|cookie|auth|credentials?)$", re.IGNORECASE
)


class Redactor:
    """A redactor that replaces secrets by `***`; call it with a text.

    Args:
        secrets: the values; those of fewer than 8 characters are left alone.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        forms: set[str] = set()
        for secret in secrets:
            stripped = secret.strip()
            if len(stripped) >= _SHORTEST:
                # as they stand, and as they stand inside JSON, the repr of an exception or an address
                escaped = (json.dumps(stripped)[1:-1], json.dumps(stripped, ensure_ascii=False)[1:-1])
                in_url = (quote(stripped), quote(stripped, safe=""))
                forms.update((stripped, *escaped, *in_url, repr(stripped)[1:-1]))
        self._forms = sorted(forms, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for form in self._forms:
            if form in text:
                text = text.replace(form, REDACTED)
        return text

    def json(self, text: str, indent: int | None = None) -> str:
        """Return a text of JSON with secrets taken out of the texts in it; keys, roles, outcomes and numbers stay."""
        if not any(form in text for form in self._forms):
            return text
        return json.dumps(self.data(json.loads(text)), indent=indent)

    def data(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            # the key of a count of errors is a text; one that is the secret is a name by chance
            names = {name: name if name in self._forms else self(str(name)) for name in value}
            return {names[name]: item if name in _NEVER_SECRET else self.data(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.data(item) for item in value]
        return self(value) if isinstance(value, str) else value

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Take secrets out of the texts of what is raised inside, and of its causes; the class stays."""
        try:
            yield
        except Exception as error:
            self.clean(error)
            raise

    def clean(self, error: BaseException) -> None:
        seen: set[int] = set()
        current: BaseException | None = error
        while current is not None and id(current) not in seen:
            seen.add(id(current))
            current.args = tuple(self(arg) if isinstance(arg, str) else arg for arg in current.args)
            current = current.__cause__ or current.__context__


def secrets_of_run(
    base_url: str,
    api_key: str,
    headers: Mapping[str, str],
    arguments: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """Return every value that must not be written: key, headers, credentials in the URL, keys of the environment.

    A short key of plain words (`not-needed`), also in a header, is none: local servers take any, and texts have such
    words.

    Args:
        base_url: of the endpoint; user, password and secret parameters are secrets.
        headers: of requests; values under names of secrets, and long words in any, are secrets.
        arguments: of the environment and of sampling; long texts under names like api_key are secrets.
        environ: variables whose names end in KEY, TOKEN, SECRET or the like are secrets, and so is what
            a proxy's address has before its host; default `os.environ`.
    """
    found = [*([] if _is_of_words(api_key) else [api_key]), *_secrets_in(arguments or {})]
    for name, value in headers.items():
        is_named = _SECRET_NAME.search(name) is not None
        # alone, as behind its scheme; a title has several words
        said = [*([value] if is_named else []), *value.split()]
        least = _SHORTEST if is_named else _SHORTEST_ELSEWHERE
        found += [part for part in said if len(part) >= least and not _is_of_words(part)]
    try:
        parts = urlsplit(base_url)
        found += [part for part in (parts.password, unquote(parts.password or "")) if part]
        if parts.password:
            found.append(parts.netloc.rpartition("@")[0])
        found += [value for name, value in parse_qsl(parts.query) if _SECRET_NAME.search(name)]
    except ValueError:
        pass  # no URL: the endpoint raises for it
    for name, value in (os.environ if environ is None else environ).items():
        is_long = len(value) >= _SHORTEST_ELSEWHERE and not _is_of_words(value)
        if _SECRET_NAME.search(name) and is_long and not os.path.exists(value):
            found.append(value)
        if name.lower().endswith("_proxy"):
            # with the user: by itself, a password may be a word of any text
            login = value.rpartition("@")[0].rpartition("/")[2]
            found += [login] if ":" in login else []
    return found


def _is_of_words(key: str) -> bool:
    return len(key) < _LONGEST_WORDS and _WORDS.fullmatch(key.strip()) is not None


def url_without_secrets(url: str) -> str:
    """Return the URL without user, password and query."""
    try:
        parts = urlsplit(url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    except ValueError:
        return REDACTED


def _secrets_in(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _secrets_in(item, str(inner))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets_in(item, name)
    elif isinstance(value, str) and len(value) >= _SHORTEST_ELSEWHERE and _SECRET_NAME.search(name):
        yield value


@contextlib.contextmanager
def redact_logs(redact: Redactor) -> Iterator[None]:
    """Take secrets out of the texts and tracebacks of all log records of the process while this is open."""
    before = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        try:
            text = record.getMessage()
        except Exception:
            return record  # a record that cannot be printed: logging reports that itself
        record.msg, record.args = redact(text), ()
        if record.exc_info and record.exc_info[1] is not None:
            # formatters print this text where it is there already
            record.exc_text = redact("".join(traceback.format_exception(record.exc_info[1])).rstrip("\n"))
        return record

    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)
