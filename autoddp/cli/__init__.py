"""Floor 8. One file per command; imports stay inside the command that needs them, so that a launch starts fast."""
