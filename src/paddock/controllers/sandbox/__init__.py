"""The life of one sandbox: `lifecycle` holds the transitions, `plan` decides, `controller` acts."""
