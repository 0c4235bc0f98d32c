"""Network policies: what they allow, intersections, and the policy in effect. Pure."""
