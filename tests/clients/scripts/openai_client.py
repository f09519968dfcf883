"""The openai package against the server: plain, streamed, several choices, tools, refusals; sync and async."""

import asyncio
import json

import openai

MODEL = "taught"
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
GREEDY = {"model": MODEL, "temperature": 0}


def refusal(kind, client=None, **fields):
    found = None
    try:
        (client or openai.OpenAI(max_retries=0)).chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, **fields}
        )
    except openai.APIStatusError as error:
        found = error
    assert type(found) is kind, found
    assert found.body["message"], found
    return found


def sync():
    client = openai.OpenAI(max_retries=0)
    answer = client.chat.completions.create(**GREEDY, messages=MESSAGES, logprobs=True, top_logprobs=3)
    assert answer.choices[0].message.content == "It is 4.", answer
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens == 9
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3

    two = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=30.0, max_tokens=8, n=2, seed=1)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].message.content != two.choices[1].message.content

    text = client.completions.create(**GREEDY, prompt="<user>hi<bot>", max_tokens=20, logprobs=1)
    assert text.choices[0].text == "It is 4."
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL

    with client.chat.completions.stream(**GREEDY, messages=MESSAGES) as stream:
        assert stream.get_final_completion().choices[0].message.content == "It is 4."


def tools():
    client = openai.OpenAI(max_retries=0)
    first = client.chat.completions.create(**GREEDY, messages=MESSAGES, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls", first
    call = first.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    messages = [*MESSAGES, first.message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(**GREEDY, messages=messages, tools=TOOLS).choices[0]
    assert (last.message.content, last.message.tool_calls) == ("The sum is 3.", None), last

    calls, ends = [], []
    for chunk in client.chat.completions.create(**GREEDY, messages=MESSAGES, tools=TOOLS, stream=True):
        calls += chunk.choices[0].delta.tool_calls or []
        ends.append(chunk.choices[0].finish_reason)
    assert [one.function.arguments for one in calls] == [call.function.arguments]
    assert ends[-1] == "tool_calls"


def refusals():
    assert refusal(openai.BadRequestError, temperature=-1).param == "temperature"
    assert refusal(openai.NotFoundError, model="gpt-9").code == "model_not_found"
    keyless = openai.OpenAI(api_key="wrong", max_retries=0)
    assert refusal(openai.AuthenticationError, keyless).code == "invalid_api_key"
    long = [{"role": "user", "content": "x" * 5000}]
    assert refusal(openai.BadRequestError, messages=long).code == "context_length_exceeded"


async def asynchronous():
    async with openai.AsyncOpenAI(max_retries=0) as client:
        # more than the slots: nobody is turned away with 429, all wait their turn
        many = [client.chat.completions.create(**GREEDY, messages=MESSAGES) for _ in range(100)]
        answers = await asyncio.gather(*many)
        assert {answer.choices[0].message.content for answer in answers} == {"It is 4."}
        said, usage = "", None
        stream = await client.chat.completions.create(
            **GREEDY, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            said += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert (said, usage.completion_tokens) == ("It is 4.", 9)


sync()
tools()
refusals()
asyncio.run(asynchronous())
print("ok")
