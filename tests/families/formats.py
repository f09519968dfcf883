"""Chat formats of the model families: their special tokens, and templates in our own words that print the same.

Each template renders a conversation so that more turns extend it, shows tools, and prints calls as the family's
models write them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """The text of a family's conversations.

    Attributes:
        special: tokens that are left out of plain text; the first ends an answer.
        template: the chat template.
        call: an answer that calls `get_weather` for Paris and 2 days, up to the token that ends it.
        call_ends: the token behind it.
        thought: an answer that thinks "it is", and says "noon".
        tool_format: name of the parser that reads both.
    """

    special: tuple[str, ...]
    template: str
    call: str
    tool_format: str
    call_ends: str = ""
    thought: str = "<think>it is</think>noon"


_JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
_ARGUMENTS = "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson)"

_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '</tools><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + (RENAMED) + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}CALL{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_HERMES_CALL = (
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' + '
    + _ARGUMENTS
    + " + '}\n</tool_call>' }}"
)
_CODER_CALL = (
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}"
)
_OLMO_CALL = (
    "{{ '<function_calls>' + call.function.name + '(' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ key + '=' + (value | tojson) + (', ' if not loop.last else '') }}{% endfor %}{{ ')</function_calls>' }}"
)
_GEMMA3 = (
    "{{ bos_token }}{% if tools %}{{ '<start_of_turn>user\n' + (tools | tojson) + '<end_of_turn>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}" + _HERMES_CALL + "{% endfor %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_GEMMA4 = (
    "{{ bos_token }}{% if tools %}{{ '<|turn>system\n<|tool>' + (tools | tojson) + '<tool|><turn|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ 'response:' + (message.name or 'f') + '{value:<|\"|>' + message.content + '<|\"|>}<tool_response|>' }}"
    "{% else %}{% if not loop.previtem or loop.previtem.role != 'tool' %}"
    "{{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}{% endif %}"
    "{{ message.content or '' }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ '<|tool_call>call:' + call.function.name + '{' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ key + ':' + ('<|\"|>' + value + '<|\"|>' if value is string else value | tojson) }}"
    "{{ ',' if not loop.last else '' }}"
    "{% endfor %}{{ '}<tool_call|>' }}{% endfor %}{{ '<|tool_response>' }}{% else %}{{ '<turn|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\n' }}{% endif %}"
    "{# thoughts stand in <|channel>thought and <channel|> #}"
)
_LLAMA3 = (
    "{{ bos_token }}{% if tools %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' + (tools | tojson) + '<|eot_id|>' }}"
    '{# {"name": ..., "parameters": ...} #}{% endif %}'
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' }}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' + ' + _ARGUMENTS + " + '}' }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_PHI4 = (
    "{% if tools %}{{ '<|system|><|tool|>' + (tools | tojson) + '<|/tool|><|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<|tool_call|>[{"name": "\' + call.function.name + \'", "arguments": \' + '
    + _ARGUMENTS
    + " + '}]<|/tool_call|>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_GLM4 = (
    "{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\n' + (tools | tojson) }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}{{ '<|assistant|>\n' + (message.content or '') }}"
    "{% for call in message.tool_calls %}"
    "{{ ('<|assistant|>' if message.content or not loop.first else '') + call.function.name + '\n' + "
    + _ARGUMENTS
    + " }}"
    "{% endfor %}{% elif message.role == 'tool' %}{{ '<|observation|>\n' + message.content }}"
    "{% else %}{{ '<|' + message.role + '|>\n' + (message.content or '') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_GLM45 = (
    "{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\n' + (tools | tojson) }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}{{ '<|observation|>\n' + message.content }}"
    "{% else %}{{ '<|' + message.role + '|>\n' + (message.content or '') }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' + (value | string) + '</arg_value>\n' }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_HARMONY = (
    "{% if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}"
    "{% elif message.role == 'assistant' %}{% if message.content or not message.tool_calls %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + (message.content or '') + '<|end|>' }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<|start|>assistant<|channel|>commentary to=functions.' + call.function.name }}"
    "{{ ' <|constrain|>json<|message|>' + " + _ARGUMENTS + " + '<|call|>' }}{% endfor %}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + "
    + _ARGUMENTS
    + " }}"
    "{% endfor %}{{ eos_token }}{% elif message.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}{% endfor %}"
)


def _chatml(call: str, role: str = "'user' if message.role == 'tool' else message.role") -> str:
    return _CHATML.replace("RENAMED", role).replace("CALL", call)


_IM = ("<|im_end|>", "<|im_start|>")
_CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)

HERMES = Format(_IM, _chatml(_HERMES_CALL), f"<tool_call>\n{_JSON_CALL}\n</tool_call>", "hermes")
CODER = Format(_IM, _chatml(_CODER_CALL), _CODER, "qwen3_coder")
OLMO3 = Format(
    _IM,
    _chatml(_OLMO_CALL, "'environment' if message.role == 'tool' else message.role"),
    '<function_calls>get_weather(city="Paris", days=2)</function_calls>',
    "olmo3",
)
LLAMA3 = Format(
    ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    _LLAMA3,
    _JSON_CALL.replace("arguments", "parameters"),
    "llama3_json",
)
PHI4 = Format(
    (
        "<|end|>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|tool|>",
        "<|/tool|>",
        "<|tool_call|>",
        "<|/tool_call|>",
    ),
    _PHI4,
    f"<|tool_call|>[{_JSON_CALL}]<|/tool_call|>",
    "phi4_mini_json",
)
GEMMA3 = Format(
    ("<end_of_turn>", "<bos>", "<start_of_turn>"), _GEMMA3, f"<tool_call>\n{_JSON_CALL}\n</tool_call>", "hermes"
)
GEMMA4 = Format(
    (
        *("<turn|>", "<bos>", "<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
        *("<tool_response|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    _GEMMA4,
    '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
    "gemma4",
    call_ends="<|tool_response>",
    thought="<|channel>thought\nit is<channel|>noon",
)
GLM4 = Format(
    ("<|user|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>"),
    _GLM4,
    'get_weather\n{"city": "Paris", "days": 2}',
    "glm4",
    call_ends="<|observation|>",
)
GLM45 = Format(
    ("<|user|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>"),
    _GLM45,
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "glm45",
    call_ends="<|observation|>",
)
HARMONY = Format(
    ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    _HARMONY,
    "<|channel|>analysis<|message|>a city<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Paris", "days": 2}',
    "openai",
    call_ends="<|call|>",
    thought="<|channel|>analysis<|message|>it is<|end|><|start|>assistant<|channel|>final<|message|>noon",
)
MISTRAL = Format(
    (
        *("</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    _MISTRAL,
    '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}',
    "mistral",
)
