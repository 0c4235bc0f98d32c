"""The API between control planes of several clusters."""
