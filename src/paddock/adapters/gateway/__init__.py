"""Between gateways and the control plane: notifications, activity, calls, the admin server."""
