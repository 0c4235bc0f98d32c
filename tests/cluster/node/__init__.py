"""A node with a real kubelet for the test cluster."""
