"""The daemon of a sandbox: processes, files, tasks.

Imports nothing else of Paddock, so that it runs anywhere.
"""
