"""The zygote: a warm process from which every envd of a node is forked."""
