"""The bodies of requests as pydantic models: what they share, and how a body that cannot be obeyed is refused.

A field that is null counts as absent. A field that would change the result is obeyed or refused, never ignored. The
OpenAPI description is made from the same models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from verifiers_embedded.errors import ApiError


def _whole(value: Any) -> Any:
    """Return 69 for 69.0, also in lists: JSON Schema calls both integers."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list) and any(isinstance(item, float | list) for item in value):
        return [_whole(item) for item in value]
    return value


def as_given(value: Any, check: Callable[[Any], Any]) -> Any:
    """Check a value and give it on as it is: chat templates print the keys of a dict in its own order."""
    check(value)
    return value


def only(*values: Any) -> Any:
    """Make an unsupported field, which is taken where it asks for what is done anyway."""
    return Field(None, json_schema_extra={"enum": [*values, None]})


Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Count = Annotated[Whole, Field(ge=1, description="a whole number of at least 1")]
# the largest id that any tensor of ids can hold
TokenId = Annotated[Whole, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, description="a list of at least one token id")]


def _check_neutral(name: str, value: Any, allowed: list[Any]) -> None:
    if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
        remedy = f"leave it out or give {' or '.join(map(repr, allowed))}" if allowed else "leave it out"
        raise ApiError(
            f"field {name!r} with value {value!r:.80} is not supported by this server; {remedy}",
            param=name,
            code="unsupported_parameter",
        )


class Body(BaseModel):
    """A JSON object whose null fields count as absent, and whose unknown fields must be null."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: _whole(value) for name, value in data.items() if value is not None}

    @model_validator(mode="after")
    def _only_neutral_values(self) -> Self:
        for name in self.model_fields_set:
            extra = type(self).model_fields[name].json_schema_extra
            if isinstance(extra, dict) and isinstance(allowed := extra.get("enum"), list):
                _check_neutral(name, getattr(self, name), allowed[:-1])
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()):
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}]} if field else field
        schema["additionalProperties"] = {"type": "null"}
        return schema


class RequestBody(Body):
    """A body with the fields of OpenAI's and vLLM's clients that change nothing about the tokens, or must not."""

    # ignored, whatever they hold
    user: Any = None
    store: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    priority: Any = None
    request_id: Any = None
    cache_salt: Any = None

    use_beam_search: Any = only(False)
    functions: Any = only([])
    function_call: Any = only("none", "auto")
    logit_bias: Any = only({})
    prompt_logprobs: Any = only()
    presence_penalty: Any = only(0)
    frequency_penalty: Any = only(0)
    repetition_penalty: Any = only(1)
    length_penalty: Any = only(1)
    min_tokens: Any = only(0)
    bad_words: Any = only([])
    include_stop_str_in_output: Any = only(False)
    skip_special_tokens: Any = only(True)
    spaces_between_special_tokens: Any = only(True)
    truncate_prompt_tokens: Any = only()
    add_generation_prompt: Any = only(True)
    continue_final_message: Any = only(False)
    return_tokens_as_token_ids: Any = only(False)
    modalities: Any = only(["text"])


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], body: Any) -> Model:
    """Check a parsed JSON body and read it. Raises ApiError that names the field, the value and what is expected."""
    if not isinstance(body, dict):
        names = {list: "a list", str: "a string", bool: "a boolean"}
        raise ApiError(f"the request body must be a JSON object, not {names.get(type(body), type(body).__name__)}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _refusal(model, error) from None
    except RecursionError:
        raise ApiError("the request body holds lists within lists, too deep to be read; give plain values") from None


def _refusal(model: type[BaseModel], error: ValidationError) -> ApiError:
    """Return the refusal of the first field at fault, in OpenAI's words."""
    first = error.errors(include_url=False)[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, ApiError):
        return raised
    where = first["loc"]
    name = str(where[0]) if where else ""
    if first["type"] == "missing" and len(where) == 1:
        hint = "; GET /v1/models lists the name to give" if name == "model" else ""
        return ApiError(f"field {name!r} is missing{hint}", param=name)
    if first["type"] == "extra_forbidden":
        return ApiError(
            f"field {_path(where)!r} is unknown here, and ignoring it could change the result; leave it out",
            param=name,
            code="unsupported_parameter",
        )
    field = model.model_fields.get(name)
    if field is not None and field.description and (len(where) == 1 or name not in ("messages", "tools")):
        return ApiError(f"field {name!r} must be {field.description}, not {first['input']!r:.80}", param=name)
    if first["type"] == "missing":
        return ApiError(f"{_path(where)} is missing", param=name)
    if raised is not None:
        return ApiError(f"{_path(where)}.{raised}", param=name)
    return ApiError(f"{_path(where)}: {first['msg'].lower()}, not {first['input']!r:.80}", param=name)


def _path(where: tuple[int | str, ...]) -> str:
    """Return a place in a body as it is written in code, e.g. messages[2].role."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
