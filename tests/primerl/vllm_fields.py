"""What vLLM documents of chat completions, as far as the scorer uses it: field to a check of its value.

From `ChatCompletionRequest` (vllm/entrypoints/openai/chat_completion/protocol.py, commit 002032ee) and the pages
"OpenAI-Compatible Server", "Tool Calling" and "LoRA Adapters" of its documentation.
"""


def is_number(low, high):
    return lambda value: type(value) in (int, float) and low <= value <= high


def is_tools(value):
    return bool(value) and all(
        set(one) == {"type", "function"} and one["type"] == "function" and "name" in one["function"]
        for one in value
    )


def is_messages(value):
    for one in value:
        known = {
            "system": {"role", "content"},
            "user": {"role", "content"},
            "assistant": {"role", "content", "tool_calls"},
            "tool": {"role", "content", "tool_call_id"},
        }[one["role"]]
        if not set(one) <= known:
            return False
    return bool(value)


FIELDS = {
    "model": lambda value: isinstance(value, str) and value,
    "messages": is_messages,
    "temperature": is_number(0, 2),
    "top_p": is_number(1, 1),
    "max_tokens": lambda value: type(value) is int and value >= 1,
    "seed": lambda value: type(value) is int and -(2**63) <= value < 2**63,
    "stream": lambda value: value is False,
    "tools": is_tools,
    "tool_choice": lambda value: value == "auto",
    "top_k": lambda value: value == -1,
    "min_p": is_number(0, 0),
    "repetition_penalty": is_number(1, 1),
    "skip_special_tokens": lambda value: value is False,
    "spaces_between_special_tokens": lambda value: value is False,
    "chat_template_kwargs": lambda value: value == {"enable_thinking": False},
}
OF_OPENAI = {
    "model", "messages", "temperature", "top_p", "max_tokens", "seed", "stream", "tools", "tool_choice",
}  # fmt: skip
FLAGS = {
    "--host", "--port", "--served-model-name", "--max-model-len", "--dtype", "--tool-call-parser",
    "--generation-config", "--max-lora-rank", "--gpu-memory-utilization",
}  # fmt: skip
SWITCHES = {"--enable-auto-tool-choice", "--enable-lora"}


def problems(body):
    """Fields that are not documented, or whose value is not."""
    return [
        f"{name} = {value!r}"
        for name, value in body.items()
        if name not in FIELDS or not FIELDS[name](value)
    ]
