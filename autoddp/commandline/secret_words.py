"""Which words of a command line, and which variables, look like secrets: they are not repeated, and no digest has them.

A digest of a short secret tells it to who tries all of them. Names and forms can only be guessed: what is called a
password, a token, a secret, credentials or an API key, and the password in an address (`https://me:secret@host`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_NAME = re.compile(
    r"(^|[-_.])(password|passwd|passphrase|secret|token|credentials?|auth"
    r"|((api|access|secret|private|auth|wandb|encryption)[-_.]?key(id)?))([-_.]?(file|path|id))?$",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(://[^/\s:@]{0,256}:)[^/\s@]{1,4096}@")


def is_secret(name: str) -> bool:
    """Whether a variable or an option of this name may hold a secret.

    >>> is_secret("HF_TOKEN"), is_secret("--api-key"), is_secret("--max-tokens"), is_secret("--tokenizer")
    (True, True, False, False)
    """
    return bool(_NAME.search(name))


def without_secrets(words: Iterable[str]) -> list[str]:
    """The words of a command line with `***` in the place of what looks like a secret.

    >>> without_secrets(["--lr", "0.1", "--token", "hunter2", "--password=x", "http://me:pw@proxy:80/"])
    ['--lr', '0.1', '--token', '***', '--password=***', 'http://me:***@proxy:80/']
    """
    found, follows = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if follows and not word.startswith("-"):
            word = HIDDEN
        elif equals and is_secret(name):
            word = f"{name}={HIDDEN}"
        follows = not equals and word.startswith("-") and is_secret(name)
        found.append(_IN_ADDRESS.sub(rf"\1{HIDDEN}@", word))
    return found
