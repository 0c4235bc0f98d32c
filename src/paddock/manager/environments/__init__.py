"""Claims addressed to environments: choice of a member, queue, tickets."""
