"""The Runtime port and its drivers: simulated, local (this machine), kubernetes (pods)."""
