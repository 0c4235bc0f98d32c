"""`paddock up`: every process of one machine, supervised, with progress and output."""
