"""`paddock doctor`: probes of this machine, and their report."""
