"""An agent of the OpenAI Agents SDK that works in a sandbox."""

import os

from agents import RunConfig, Runner
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell

agent = SandboxAgent(
    name="Engineer",
    model=os.environ.get("MODEL", "gpt-5"),
    instructions="Answer with the help of commands in the sandbox.",
    capabilities=[Shell()],
)
sandbox = SandboxRunConfig(
    client=E2BSandboxClient(), options=E2BSandboxClientOptions(sandbox_type="e2b", template="base")
)
result = Runner.run_sync(
    agent, "Which version of Python is installed?", run_config=RunConfig(sandbox=sandbox)
)
print(result.final_output)
