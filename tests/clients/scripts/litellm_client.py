"""litellm's OpenAI-compatible provider against the server: plain, async, streamed, tools, refusals."""

import asyncio
import os

import litellm

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
COMMON = {
    "model": "openai/taught",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "temperature": 0,
    "num_retries": 0,
}

answer = litellm.completion(**COMMON, messages=MESSAGES)
assert answer.choices[0].message.content == "It is 4.", answer
assert answer.usage.completion_tokens == 9

streamed = "".join(
    chunk.choices[0].delta.content or "" for chunk in litellm.completion(**COMMON, messages=MESSAGES, stream=True)
)
assert streamed == "It is 4.", streamed

called = litellm.completion(**COMMON, messages=MESSAGES, tools=TOOLS).choices[0]
assert called.finish_reason == "tool_calls", called
assert called.message.tool_calls[0].function.name == "add"

text = litellm.text_completion(
    **{**COMMON, "model": "text-completion-openai/taught"}, prompt="<user>hi<bot>", max_tokens=20
)
assert text.choices[0].text == "It is 4.", text


async def asynchronous():
    answers = await asyncio.gather(*(litellm.acompletion(**COMMON, messages=MESSAGES) for _ in range(10)))
    assert {one.choices[0].message.content for one in answers} == {"It is 4."}
    said = ""
    async for chunk in await litellm.acompletion(**COMMON, messages=MESSAGES, stream=True):
        said += chunk.choices[0].delta.content or ""
    assert said == "It is 4.", said


asyncio.run(asynchronous())
refused = None
try:
    litellm.completion(**COMMON, messages=MESSAGES, max_tokens=-1)
except litellm.BadRequestError as error:
    refused = str(error)
assert refused, "the request was not refused"
assert "max_tokens" in refused, refused
print("ok")
