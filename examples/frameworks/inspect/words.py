"""A task for Inspect: the model uses bash in a sandbox; a template is built from the Dockerfile."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash


@task
def words() -> Task:
    return Task(
        dataset=[Sample("How many words does /srv/poem.txt have?", target="10")],
        solver=[use_tools(bash(timeout=60)), generate()],
        scorer=includes(),
        sandbox=("e2b", "Dockerfile"),
    )
