"""One sandbox of a node from build to deletion: lifecycle, freeze, hibernation, warm stock."""
