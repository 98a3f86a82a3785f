"""`python -m autoddp …`: the same command as `autoddp …`."""

import sys

if __name__ == "__main__":
    # Python looks in the current folder first, where a project may have files with the names of Python's own modules.
    # It is not left out: under --run-path the script finds its modules there.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.append(sys.path.pop(0))
    from autoddp.cli.main import main

    main()
