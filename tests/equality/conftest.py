"""The matrix's own modules are found from here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
