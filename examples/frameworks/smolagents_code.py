"""A code agent of smolagents: each step of the model is Python code that runs in a sandbox."""

import os

from smolagents import CodeAgent, OpenAIModel

model = OpenAIModel(os.environ.get("MODEL", "gpt-5"))
with CodeAgent(tools=[], model=model, executor_type="e2b") as agent:
    print(agent.run("What is the 30th Fibonacci number?"))
