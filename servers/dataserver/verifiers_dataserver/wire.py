"""Requests and answers: version 1, as kolibrify's clients speak it, and version 2 of our own.

Requests are checked to the letter (a number is not text), and fields that nobody knows are let pass.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# pydantic asks for this one before Python 3.12
from typing_extensions import TypedDict

LARGEST = 2**53
"""Whole numbers up to here are the same for every JSON reader."""

PAGE = 256
"""Rows of a dataset that come at once unless a request says how many."""


def _whole(value: Any) -> Any:
    """Turn a whole float into an int: JSON has one kind of number, so 3.0 is the whole number 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=0, le=LARGEST), BeforeValidator(_whole)]
Positive = Annotated[int, Field(ge=1, le=LARGEST), BeforeValidator(_whole)]
Seed = Annotated[int, Field(ge=-LARGEST, le=LARGEST), BeforeValidator(_whole)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class SampleRequest(_Request):
    """Version 1: prompts for an iteration."""

    iteration: Count = Field(description="Optimizer step; chooses the stage.")
    batch_size: Positive = Field(description="Prompts wanted.")


class GradeItem(_Request):
    sample_id: str
    completion: str
    completion_tokens: Count | None = None
    completion_index: Count | None = Field(default=None, description="Comes back with the reward.")


class GradeRequest(_Request):
    """Version 1: completions of an iteration."""

    iteration: Count
    items: list[GradeItem]


class SampleRequest2(_Request):
    """Version 2: the prompts of a block. The same request always has the same answer."""

    optimizer_step: Count = Field(description="The step that first trains these prompts; it alone chooses the stage.")
    generation_step: Count = Field(description="The block's number in the run.")
    batch_size: Positive = Field(description="Prompts wanted.")
    seed: Seed | None = Field(default=None, description="In place of the curriculum's.")
    rank: Count = Field(default=0, description="Who asks; every rank gets the same prompts.")
    updates_per_block: Positive = Field(default=1, description="Optimizer steps that a block serves.")
    first_blocks: list[Count] | None = Field(
        default=None,
        description="The block with which each stage but the first begins; left out, it follows from "
        "updates_per_block.",
    )
    prompts_per_block: Positive | None = Field(
        default=None, description="Prompts of a whole block; batch_size when left out."
    )
    offset: Count = Field(default=0, description="Prompts of the block before these; for a part of a block.")


class RowsRequest(_Request):
    """Rows of one dataset in their order, for evaluations."""

    dataset: str
    offset: Count = 0
    limit: Positive | None = Field(
        default=None, description=f"Rows wanted; {PAGE} when left out, or the max_batch where that is less."
    )


class Part(TypedDict, total=False):
    """A part of a message's content; of other kinds than texts only the kind matters."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    type: str
    text: str | None


class Message(TypedDict, total=False):
    """A message of the policy, its tools, or its user; without a role it is the policy's."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    role: str
    content: str | list[Part | str] | None


class GradeItem2(_Request):
    """A completion to grade, as a text or as the messages of the policy and its tools."""

    sample_id: str
    completion: str | list[Message]
    completion_tokens: Count | None = None
    completion_index: Count = Field(description="Comes back with the reward.")


class GradeRequest2(_Request):
    """Version 2: completions; those of one sample_id are a group."""

    items: list[GradeItem2]
    optimizer_step: Count | None = Field(default=None, description="Of the prompts; goes to the log.")
    generation_step: Count | None = Field(default=None, description="Of the prompts; goes to the log.")
    seed: Seed | None = Field(default=None, description="Of the prompts; goes to the log.")
    rank: Count = Field(default=0, description="Who asks; goes to the log.")
