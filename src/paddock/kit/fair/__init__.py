"""Fair sharing between groups, such as teams: queues and slots."""
