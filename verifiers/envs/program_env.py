"""ProgramEnv: any program, run once a rollout in a sandbox, that knows only a base URL and a key."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Unpack

from verifiers.envs.agent_env import AgentOptions, GatewayEnv, last_errors
from verifiers.errors import AgentError, ConfigError, SandboxError
from verifiers.gateway.gateway import Gateway
from verifiers.gateway.listener import past_proxies
from verifiers.gateway.session import Session
from verifiers.keywords import nearest_name
from verifiers.parsers.messages import cleanup_messages
from verifiers.rubrics.rubric import Rubric, RubricGroup
from verifiers.rubrics.scoring import is_finite_number
from verifiers.sandbox import open_sandbox, renewed
from verifiers.sandbox.pipes import FLOOD_BYTES
from verifiers.sandbox.spec import IsolationLevel, RunResult, Sandbox, SandboxSpec
from verifiers.types import Messages, RolloutInput, RolloutScore, State, message_field, message_text

Files = Mapping[str, str | bytes | Path]

FAILED = "failed_program"
NO_LIMIT_S = 7 * 24 * 3600.0
RESULT_BYTES = 1 << 20
# folders first, each made one where it is something else; then what is in the place of files is removed
_REPLACE = """
while [ "$1" != -- ]; do [ -d "$1" ] && [ ! -L "$1" ] || { rm -rf -- "$1" && mkdir -- "$1"; } || exit; shift; done
exec rm -rf "$@"
"""
PLACEHOLDERS = ("prompt", "messages", "model", "base_url", "task", "example_id", "answer")
# "${model}" is a variable of a shell
_PLACEHOLDER = re.compile(r"(?<!\$)\{([\w.-]+)\}")


class ProgramEnv(GatewayEnv):
    """An environment around a program, which is run once a rollout, in a sandbox of its own.

    OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ANTHROPIC_MODEL are set
    for it. In a sandbox without network nothing but that base URL can be reached. The state gets the program's
    `stdout` and `stderr`, the first `output_bytes` of each, and its `exit_code`; what it printed is the completion,
    or, where that is nothing, the policy's last answer. A program that ends with another exit code than 0, or
    without an answer of the policy, has failed.

    Args:
        command: the program and its arguments, in which placeholders are replaced: `{prompt}`, the text of the
            newest user message; `{messages}`, the whole prompt as JSON; `{model}`, `{base_url}`, `{task}`,
            `{example_id}`, and `{info.NAME}`, an entry of the row's info. Other braces stay as they are.
        sandbox: isolation level and limits, or a level with default limits. Its `wall_time_s` bounds `score` alone.
        stdin: text for the program's standard input, with the same placeholders; None for nothing.
        files: what its working directory holds at the start, by relative path: text, bytes or the `Path` of a file to
            copy; or a function of the row that returns such a mapping.
        result: file in the working directory that has the reward after the program's end: a number, or a JSON object
            with "reward", whose other numbers become metrics. The object is in `state["result"]`.
        score: command that writes `result`, run after the program and everything it started have ended, in a sandbox
            that `sandbox.renewed` gives: the working directory is the program's, and limits and all else the spec's.
            It may have `{answer}` too. What is in the place of `result` before is removed.
        score_files: as `files`, written before `score` runs, in the place of whatever is there.
        failed_program: "unscored": a program that fails by itself has no reward (`environment_error`); "zero": it has
            the reward 0.0 and is trained on, with the reason in `state["result"]["failed_program"]`, and the metric
            `failed_program` is the share of such programs. By itself means after an answer of the policy, by exit
            code, signal, a `result` of its own that is none, or files that cannot be handed to `score`.
        **kwargs: as `AgentEnv`. A `rubric` scores by the state, in place of `result`.

    Raises:
        ConfigError: a misspelled placeholder, one that would tell the program the answer, or a file that is missing.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        sandbox: SandboxSpec | IsolationLevel | None = None,
        stdin: str | None = None,
        files: Files | Callable[[RolloutInput], Files] | None = None,
        result: str | None = None,
        score: Sequence[str] | None = None,
        score_files: Files | Callable[[RolloutInput], Files] | None = None,
        failed_program: Literal["zero", "unscored"] = "unscored",
        **kwargs: Unpack[AgentOptions],
    ) -> None:
        if result is not None and kwargs.get("rubric") is None:
            kwargs["rubric"] = _ResultRubric(parser=kwargs.get("parser"))
        if failed_program not in ("zero", "unscored"):
            raise ConfigError(f"failed_program is {failed_program!r}; give 'zero' or 'unscored'.")
        if failed_program == "zero":
            kwargs["rubric"] = _FailedIsZero([kwargs.get("rubric") or Rubric(parser=kwargs.get("parser"))])
        self.failed_program = failed_program
        super().__init__(**kwargs)
        self.command = checked_words("command", command)
        self.sandbox = SandboxSpec(sandbox) if isinstance(sandbox, str) else sandbox or SandboxSpec()
        self.stdin = stdin
        self.files = files if callable(files) else _contents(files or {})
        self.result = result
        self.score = None if score is None else checked_words("score", score)
        self.score_files = score_files if callable(score_files) else _contents(score_files or {})
        self._check_settings()

    def _check_settings(self) -> None:
        names = placeholder_names(*self.command, self.stdin or "")
        placeholder_names(*(self.score or ()))
        if "answer" in names:
            raise ConfigError("{answer} would tell the program the row's answer; it is for score= alone.")
        if self.score is not None and self.result is None:
            raise ConfigError("score= needs result=, the name of the file that it writes the reward to.")
        if self.score is None and self.score_files:
            raise ConfigError("score_files= are for the command of score=, which is not given.")
        if (self.system_prompt or self.few_shot) and "messages" not in names:
            raise ConfigError(
                "system_prompt and few_shot reach the program by {messages} alone, which command and stdin lack."
            )

    async def _run_agent(self, row: RolloutInput, session: Session, gateway: Gateway) -> dict[str, Any]:
        spec, socket = self.sandbox, ""
        if spec.isolation != "process":
            socket = await gateway.unix_socket()
            spec = dataclasses.replace(spec, readable=(*spec.readable, socket))
        async with await open_sandbox(spec) as sandbox:
            url = gateway.url
            if sandbox.isolation != "process":
                url = f"http://127.0.0.1:{await sandbox.relay(socket)}"
            values = placeholder_values(row, session.model, url)
            await self._write_files(sandbox, await _files_of(self.files, row))
            program = _Program(sandbox, [filled(word, values, row) for word in self.command])
            stdin = None if self.stdin is None else filled(self.stdin, values, row)
            result, judged = None, None
            try:
                await self._within_budget(session, program.run(stdin, gateway_variables(url, session, spec.env)))
                if not session.calls and not session.client.is_cut_off:
                    why = session.why_unanswered(
                        "does it use OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY?"
                    )
                    raise AgentError(
                        f"{program} ended without an answer of the policy; {why}{program.last_errors}"
                    ) from session.standing_failure
                if self.score is not None:
                    judged = await _renewed(sandbox, program)
                elif self.result is not None:
                    result = await _read_result(sandbox, self.result, program)
            except AgentError as error:
                # what has a cause is a failure of the provider or of the sandbox
                if self.failed_program == "unscored" or not session.calls or error.__cause__ is not None:
                    raise
                result = {"reward": 0.0, FAILED: str(error)}
            state = program.state(is_chat=not isinstance(row["prompt"], str))
            if judged is not None and self.score is not None:
                async with judged:
                    result = await self._run_score(judged, self.score, values, row)
            return state if result is None else {**state, "result": result}

    async def _run_score(
        self, sandbox: Sandbox, score: Sequence[str], values: Mapping[str, str], row: RolloutInput
    ) -> dict[str, Any]:
        assert self.result is not None
        files = await _files_of(self.score_files, row)
        names = [f"./{name}" if not name.startswith("/") else name for name in (self.result, *files)]
        folders = {f"./{folder}" for name in names if name[0] == "." for folder in PurePosixPath(name).parents}
        replaced = await sandbox.run(["sh", "-c", _REPLACE, "sh", *sorted(folders - {"./."}), "--", *names])
        if replaced.exit_code != 0:
            raise SandboxError(f"the places of score= could not be cleared: {replaced.stderr.strip()}")
        await self._write_files(sandbox, files)
        values = {**values, "answer": _text(row.get("answer", ""))}
        scoring = _Program(sandbox, [filled(word, values, row) for word in score], "the score command")
        await scoring.run(None, {}, self.sandbox.wall_time_s)
        return await _read_result(sandbox, self.result, scoring)

    async def _write_files(self, sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            if self.result is not None and PurePosixPath(name) == PurePosixPath(self.result):
                raise ConfigError(f"the file {name!r} is the result, which the program or score= writes.")
            try:
                await sandbox.write(name, content)
            except OSError as error:
                raise SandboxError(f"the file {name!r} could not be written: {error.strerror}") from error


class _FailedIsZero(RubricGroup):
    """Another rubric's scores, with a metric of failed programs; those are 0 and not shown to the other rubric."""

    async def score_states(self, states: Sequence[State]) -> list[RolloutScore]:
        ended = [state for state in states if FAILED not in (state.get("result") or {})]
        of_state = dict(zip(map(id, ended), await super().score_states(ended) if ended else [], strict=True))
        scores = [of_state.get(id(state)) or RolloutScore(0.0) for state in states]
        for state, score in zip(states, scores, strict=True):
            score["metrics"][FAILED] = float(id(state) not in of_state)
        return scores


class _ResultRubric(Rubric):
    """Rewards and metrics of `state["result"]`."""

    async def score_states(self, states: Sequence[State]) -> list[RolloutScore]:
        scores = []
        for state in states:
            numbers = {name: float(value) for name, value in state["result"].items() if is_finite_number(value)}
            scores.append(RolloutScore(numbers.pop("reward"), numbers))
        return scores


class _Program:
    """A command in a sandbox, and what became of it."""

    def __init__(self, sandbox: Sandbox, command: Sequence[str], name: str = "the program") -> None:
        self._sandbox = sandbox
        self._command = command
        self._name = name
        self._ran: RunResult | None = None

    def __str__(self) -> str:
        return f"{self._name} {self._command[0]!r}"

    async def run(self, stdin: str | None, env: Mapping[str, str], timeout_s: float = NO_LIMIT_S) -> None:
        """Run it to its end. Raises AgentError where it does not succeed."""
        ran = await self._sandbox.run(self._command, stdin=stdin, timeout_s=timeout_s, env=env)
        self._ran = ran
        if ran.timed_out:
            raise AgentError(f"{self} did not end within wall_time_s={timeout_s:g}{self.last_errors}")
        # containers give 128 and the signal
        signal = -ran.exit_code if ran.exit_code and ran.exit_code < 0 else (ran.exit_code or 0) - 128
        if 0 < signal < 32:
            why = "where its memory ran out, raise the sandbox's memory_bytes"
            if ran.dropped_bytes > FLOOD_BYTES:
                why = f"it printed {ran.dropped_bytes:,} bytes more than output_bytes"
            raise AgentError(f"{self} was killed by signal {signal}; {why}{self.last_errors}")
        if ran.exit_code != 0:
            raise AgentError(f"{self} ended with exit code {ran.exit_code}{self.last_errors}")

    @property
    def last_errors(self) -> str:
        """The end of its stderr, for the end of a message."""
        return last_errors(self._ran.stderr if self._ran is not None else "")

    def state(self, *, is_chat: bool) -> dict[str, Any]:
        """Return items of the state; a program that was cut off has printed nothing."""
        ran = self._ran
        if ran is None:
            return {"stdout": "", "stderr": "", "exit_code": None}
        items: dict[str, Any] = {"stdout": ran.stdout, "stderr": ran.stderr, "exit_code": ran.exit_code}
        said = ran.stdout.strip()
        if said:
            items["completion"] = [{"role": "assistant", "content": said}] if is_chat else said
        return items


def gateway_variables(url: str, session: Session, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        **past_proxies(environ),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "OPENAI_MODEL": session.model,
        # Anthropic's clients add the version themselves
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "ANTHROPIC_MODEL": session.model,
    }


# -- placeholders and files -----------------------------------------------------------------------------------------


def checked_words(name: str, command: Sequence[str]) -> list[str]:
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        raise ConfigError(
            f"{name} is {command!r}; give a list of words, such as ['my-agent', '--task', '{{prompt}}']."
        )
    return list(command)


def placeholder_names(*texts: str) -> set[str]:
    """Return the names of the placeholders in texts. Raises ConfigError for a misspelled one."""
    names = {name for text in texts for name in _PLACEHOLDER.findall(text)}
    for name in names.difference(PLACEHOLDERS):
        if (near := nearest_name(name, PLACEHOLDERS)) is not None:
            raise ConfigError(f"there is no placeholder {{{name}}}; did you mean {{{near}}}?")
    return names


def checked_line(name: str, line: str) -> str:
    """Return a line for the shell. Raises ConfigError for a placeholder in quotes, as each becomes a quoted word."""
    known = [found for found in _PLACEHOLDER.findall(line) if found in PLACEHOLDERS or found.startswith("info.")]
    value = "it's"
    tried = _PLACEHOLDER.sub(lambda match: shlex.quote(value) if match[1] in known else match[0], line)
    try:
        words = shlex.split(tried)
    except ValueError:
        words = []
    if sum(word.count(value) for word in words) < len(known):
        raise ConfigError(f"{name} is the line {line!r}; write its placeholders outside of quotes, which are added.")
    return line


def placeholder_values(row: RolloutInput, model: str, url: str) -> dict[str, str]:
    prompt: Messages = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else cleanup_messages(prompt)
    of_user = [message for message in messages if message_field(message, "role") == "user"]
    return {
        "prompt": message_text(of_user[-1]) if of_user else "",
        "messages": json.dumps(messages, ensure_ascii=False),
        "model": model,
        "base_url": f"{url}/v1",
        "task": str(row.get("task", "")),
        "example_id": str(row.get("example_id", "")),
    }


def filled(text: str, values: Mapping[str, str], row: RolloutInput, quoted: Callable[[str], str] = str) -> str:
    """Return a text with its placeholders replaced, all at once: what stands in a value stays as it is."""

    def value(match: re.Match[str]) -> str:
        kind, dot, name = match[1].partition(".")
        if kind != "info" or not dot:
            return quoted(values[match[1]]) if match[1] in values else match[0]
        info = row.get("info") or {}
        if name not in info:
            raise ConfigError(
                f"the info of row {row.get('example_id')} has no {name!r} for {match[0]}: {sorted(info)}."
            )
        return quoted(_text(info[name]))

    return _PLACEHOLDER.sub(value, text)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def _files_of(
    files: Mapping[str, bytes] | Callable[[RolloutInput], Files], row: RolloutInput
) -> Mapping[str, bytes]:
    if not callable(files):
        return files
    function = files
    return await asyncio.to_thread(lambda: _contents(function(row)))


def _contents(files: Files) -> dict[str, bytes]:
    """Return files' contents. Raises ConfigError where one cannot be had."""
    contents = {}
    for name, given in files.items():
        try:
            content = given.read_bytes() if isinstance(given, Path) else given
        except OSError as error:
            raise ConfigError(f"the file {name!r} is to be {str(given)!r}: {error.strerror}.") from error
        contents[name] = content.encode() if isinstance(content, str) else content
    return contents


async def _renewed(sandbox: Sandbox, program: _Program) -> Sandbox:
    try:
        return await renewed(sandbox)
    except OSError as error:
        raise AgentError(f"what {program} left cannot be scored: {error.strerror}") from None


# -- the result -----------------------------------------------------------------------------------------------------


async def _read_result(sandbox: Sandbox, name: str, writer: _Program) -> dict[str, Any]:
    """Return the object in a result file.

    Raises:
        AgentError: there is none with a finite reward.
    """
    try:
        data = await sandbox.read(name, max_bytes=RESULT_BYTES)
    except FileNotFoundError:
        raise AgentError(f"{writer} left no file {name!r} with a reward{writer.last_errors}") from None
    except OSError as error:
        raise AgentError(f"the file {name!r} of {writer} cannot be read: {error.strerror}") from None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AgentError(f"the file {name!r} of {writer} is not JSON ({error}): {data[:200]!r}") from None
    result: dict[str, Any] = value if isinstance(value, dict) else {"reward": value}
    for key, number in result.items():
        if (key == "reward" or isinstance(number, (int, float))) and not is_finite_number(number):
            raise AgentError(f"the file {name!r} of {writer} has {key}={number!r:.100}, not a finite number")
    if "reward" not in result:
        raise AgentError(f"the file {name!r} of {writer} has no 'reward', only {sorted(result)!r:.200}")
    return result
