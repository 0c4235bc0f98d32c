"""One package per kind: `plan.py` decides (pure), `controller.py` acts, `events.py` maps changes to
keys, `status.py` computes the status.
"""
