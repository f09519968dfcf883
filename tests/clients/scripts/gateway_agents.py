"""SDKs and agents that own their loop, each asked for 1 + 2 with a tool that adds, whole and streamed.

They know a base URL and a key, from the environment, and the model's name. The last line that
`gateway_agents.py NAME whole streamed` prints has, as JSON and for each mode, what the tool was called with, and the
answer.
"""

import asyncio
import json
import os
import sys

MODEL = "policy"
BASE_URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
QUESTION = "What is 1 + 2?"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CALLED = []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    CALLED.append([a, b])
    return a + b


def answered(arguments):
    return str(add(**json.loads(arguments)))


def openai_chat(stream):
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        arguments = {"model": MODEL, "messages": messages, "tools": tools}
        if stream:
            with client.chat.completions.stream(**arguments) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**arguments).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = answered(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_responses(stream):
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}]
    items = [{"role": "user", "content": QUESTION}]
    while True:
        arguments = {"model": MODEL, "input": items, "tools": tools, "store": False}
        if stream:
            with client.responses.stream(**arguments) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**arguments)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [item.model_dump(exclude_none=True) for item in response.output]
        for call in calls:
            result = answered(call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def anthropic(stream):
    import anthropic

    client = anthropic.Anthropic(base_url=BASE_URL, api_key=KEY)
    tools = [{"name": "add", "description": "Add.", "input_schema": PARAMETERS}]
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        arguments = {"model": MODEL, "max_tokens": 200, "messages": messages, "tools": tools}
        if stream:
            with client.messages.stream(**arguments) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**arguments)
        if message.stop_reason != "tool_use":
            return message.content[0].text
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def litellm(stream):
    import litellm

    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        arguments = {"model": f"openai/{MODEL}", "messages": messages, "tools": tools, "max_tokens": 200}
        answer = litellm.completion(**arguments, api_base=BASE_URL, api_key=KEY, stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = answered(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_agents(stream):
    import agents
    import openai

    async def run():
        model = agents.OpenAIChatCompletionsModel(MODEL, openai.AsyncOpenAI())
        agent = agents.Agent(name="adder", instructions="Add.", tools=[agents.function_tool(add)], model=model)
        settings = agents.RunConfig(tracing_disabled=True)
        if not stream:
            return (await agents.Runner.run(agent, QUESTION, run_config=settings)).final_output
        result = agents.Runner.run_streamed(agent, QUESTION, run_config=settings)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def smolagents(stream):
    import smolagents

    # a forced call would be sampled from another distribution than the policy's, which training refuses
    model = smolagents.OpenAIModel(MODEL, api_base=BASE_URL, api_key=KEY, tool_choice="auto")
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(add)], model=model, max_steps=3, stream_outputs=stream, verbosity_level=0
    )
    return agent.run(QUESTION)


def pydantic_ai(stream):
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
    agent = pydantic_ai.Agent(model, instructions="Add.", tools=[add])

    async def run():
        if not stream:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    return asyncio.run(run())


def mini_swe_agent(stream):
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    assert not stream, "mini-swe-agent does not stream"
    model = LitellmModel(
        model_name=f"openai/{MODEL}",
        model_kwargs={"api_base": BASE_URL, "api_key": KEY},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model, LocalEnvironment(), system_template="You have a shell.", instance_template="{{task}}", step_limit=4
    )
    found = agent.run(QUESTION)
    with open("sum") as file:
        CALLED.append(file.read())
    return found["submission"]


if __name__ == "__main__":
    told = []
    for mode in sys.argv[2:]:
        final = globals()[sys.argv[1]](mode == "streamed")
        told.append([[*CALLED], final])
        CALLED.clear()
    # on a line of its own: smolagents leaves the last one that it shows open
    print(f"\n{json.dumps(told)}")
