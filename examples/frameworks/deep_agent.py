"""A deep agent of LangChain whose files and commands are those of a sandbox."""

import os

from deepagents import create_deep_agent
from e2b import Sandbox
from langchain_e2b import E2BSandbox
from langchain_openai import ChatOpenAI

with Sandbox.create() as box:
    agent = create_deep_agent(
        model=ChatOpenAI(model=os.environ.get("MODEL", "gpt-5")),
        backend=E2BSandbox(sandbox=box),
    )
    question = "How many users does /etc/passwd of the sandbox have?"
    result = agent.invoke({"messages": [{"role": "user", "content": question}]})
print(result["messages"][-1].content)
