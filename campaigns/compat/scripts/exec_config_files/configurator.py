"""Read by exec() in exec_config.py: a file's lines, then --name=value words, set globals of the script."""

import sys
from ast import literal_eval
from pathlib import Path

for word in sys.argv[1:]:
    if "=" not in word:
        print(f"overriding config with {word}")
        exec((Path(HERE) / word).read_text())  # noqa: F821
    else:
        name, _, text = word.removeprefix("--").partition("=")
        if name not in globals():
            raise ValueError(f"unknown config key: {name}")
        try:
            value = literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        assert type(value) is type(globals()[name])
        globals()[name] = value
