"""Pure changes of a Sandbox: claim, deadlines, pause strategy, recycling."""
