"""Conversations in requests: messages, tools, and the form that an answer must have."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WrapValidator, model_validator

from verifiers_embedded.errors import ApiError
from verifiers_embedded.routes.bodies import Body, Text, as_given
from verifiers_embedded.text.grammars import schema_text
from verifiers_embedded.text.prompts import RESERVED_TEMPLATE_ARGUMENTS


class Called(BaseModel):
    name: Text
    arguments: Text


class Call(BaseModel):
    """A tool call in an assistant's message."""

    function: Called


class TextPart(BaseModel):
    """A part of a message's content; there are texts only."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a conversation. With tool calls, which only the assistant has, the content may be left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: list[Annotated[Call, WrapValidator(as_given)]] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value != [] or name == "content"}

    @model_validator(mode="after")
    def _content_or_calls(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to the role 'assistant', not {self.role!r}")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; give a string or a list of text parts")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it. Text parts are joined by newlines, as vLLM does."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        parts = self.content or ""
        given["content"] = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        return given


class Function(BaseModel):
    name: Text


class Tool(BaseModel):
    function: Function


class NamedTool(BaseModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: Function


class PlainFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object"]


class NamedSchema(BaseModel):
    """A JSON schema under OpenAI's wrapping."""

    model_config = ConfigDict(extra="forbid")
    json_schema: dict[str, Any] = Field(alias="schema")
    name: Any = None
    strict: Any = None
    description: Any = None


class SchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    PlainFormat | SchemaFormat,
    Field(discriminator="type", description="an object with a 'type' of text, json_object or json_schema"),
]


def _check_template_arguments(value: dict[str, Any]) -> dict[str, Any]:
    taken = sorted((RESERVED_TEMPLATE_ARGUMENTS | {"messages"}) & set(value))
    if taken:
        raise ApiError(
            f"chat_template_kwargs may not set {', '.join(taken)}; the server does",
            param="chat_template_kwargs",
        )
    return value


TemplateArguments = Annotated[
    dict[str, Any],
    AfterValidator(_check_template_arguments),
    Field(json_schema_extra={"propertyNames": {"not": {"enum": sorted({*RESERVED_TEMPLATE_ARGUMENTS, "messages"})}}}),
]
Messages = Annotated[list[Message], Field(min_length=1, description="a list of at least one message")]
Tools = list[Annotated[Tool, WrapValidator(as_given)]]


class Constrained(Body):
    """The field that says what the text of an answer must look like."""

    response_format: ResponseFormat | None = None

    @property
    def schema_text(self) -> str | None:
        """JSON text of the schema that the answer must fit; None where it is free."""
        wanted = self.response_format
        if isinstance(wanted, SchemaFormat):
            return schema_text(wanted.json_schema.json_schema, "response_format")
        return '{"type":"object"}' if wanted is not None and wanted.type == "json_object" else None


class Conversation(Body):
    """The fields that the chat template renders."""

    messages: Messages
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return self.tools  # type: ignore[return-value]

    @property
    def text_length(self) -> int:
        """Characters that the chat template will print, roughly."""
        texts = sum(len(str(message.content)) + len(repr(message.tool_calls)) for message in self.messages)
        return texts + len(repr(self.shown_tools))
