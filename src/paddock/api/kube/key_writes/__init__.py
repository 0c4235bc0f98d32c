"""Writes of API keys: what they may contain, and the quota that they need."""
