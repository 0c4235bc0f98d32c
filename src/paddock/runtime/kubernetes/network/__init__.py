"""Egress policies of sandboxes as NetworkPolicies."""
