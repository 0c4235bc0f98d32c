"""HTTP between the control planes of several clusters."""
