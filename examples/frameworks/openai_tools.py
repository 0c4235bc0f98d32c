"""A tool loop with the OpenAI SDK: the model runs Python in a sandbox until it has an answer."""

import json
import os

from e2b import Sandbox
from openai import OpenAI

RUN_PYTHON = {
    "type": "function",
    "function": {
        "name": "run_python",
        "description": "Run a Python program in a sandbox and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}


def run_python(box: Sandbox, code: str) -> str:
    box.files.write("program.py", code)
    return box.commands.run("python3 program.py 2>&1 || true", timeout=60).stdout


client = OpenAI()
messages = [{"role": "user", "content": "What is the sum of the first 100 prime numbers?"}]
with Sandbox.create() as box:
    while True:
        completion = client.chat.completions.create(
            model=os.environ.get("MODEL", "gpt-5"), messages=messages, tools=[RUN_PYTHON]
        )
        reply = completion.choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            output = run_python(box, json.loads(call.function.arguments)["code"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
print(reply.content)
