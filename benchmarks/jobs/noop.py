"""Does nothing: what remains of a launch is the launcher."""
