"""`python launch.py …`: the same command as `autoddp …`, from a checkout that is not installed."""

from autoddp.cli.main import main

if __name__ == "__main__":
    main()
