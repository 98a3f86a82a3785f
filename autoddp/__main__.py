"""`python -m autoddp …`: the same command as `autoddp …`."""

from autoddp.cli.main import main

if __name__ == "__main__":
    main()
