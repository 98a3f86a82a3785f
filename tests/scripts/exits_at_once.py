"""Says that there is nothing to do and ends well, without having imported torch."""

import sys

print("nothing to do")
sys.exit(0)
