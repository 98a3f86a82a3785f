"""A torch that is too old is refused in one line before anything is started."""

from __future__ import annotations

import pytest
import torch

from autoddp.errors import UsageError
from autoddp.torchrun.options import load_torchrun


@pytest.mark.parametrize("version", ["2.5.1+cu124", "1.13.0", "2.4.0a0+git1"])
def test_an_old_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UsageError, match=r"^this is torch [12]\..* needs torch 2.6 or newer: pip install -U torch$"):
        load_torchrun()


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.15.0a0+git1", "3.0.0"])
def test_a_newer_one_is_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    load_torchrun()
