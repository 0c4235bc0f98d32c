"""The daemon of a sandbox: processes, files, tasks.

Imports only `wire` of Paddock, so that it runs anywhere.
"""
