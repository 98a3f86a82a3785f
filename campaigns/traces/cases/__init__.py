"""The traces, by family: one file each."""
