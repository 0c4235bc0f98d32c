"""Wire formats that envd and the node share. Standard library only."""
