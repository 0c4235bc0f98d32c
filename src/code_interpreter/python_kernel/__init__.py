"""Runs in the process of the Python kernel, in the Python of the sandbox: IPython for agents."""
