"""`paddock up`: supervises the processes of one machine and shows their progress."""
