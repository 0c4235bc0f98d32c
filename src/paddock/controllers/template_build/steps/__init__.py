"""The instructions of builds: one module for each kind of step."""
