"""The controller of SandboxClaims: `plan` decides, `controller` acts."""
