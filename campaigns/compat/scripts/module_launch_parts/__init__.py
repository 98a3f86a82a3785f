"""What the package of module_launch.py has beside its entry point."""
