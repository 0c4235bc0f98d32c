"""NetworkPolicies that enforce the egress policies of sandboxes."""
