"""Chat templates that know tools, for the tests of this folder."""

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

_TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{{ '<bot>' if m.role == 'assistant' else '<user>' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": ARGUMENTS}</tool_call>'
    "{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
PRINTS_TEXT = _TEMPLATE.replace("ARGUMENTS", "{{ c.function.arguments }}")
WANTS_OBJECTS = _TEMPLATE.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
