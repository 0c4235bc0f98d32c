"""The code interpreter: a server inside a sandbox that runs code in kernels which keep their state.

It is part of the template `code-interpreter-v1`, with a virtual environment of its own, and imports
nothing of Paddock. `kernels` runs code and knows no protocol; `e2b` serves it by E2B's; and
`python_kernel` runs in the process of the Python kernel.
"""
