"""One package per kind: plan.py decides (pure), controller.py acts."""
