"""Import KeOps without the message that it prints where there is no CUDA.

GPyTorch imports KeOps if it is installed.  Where it is imported before sketchgp, the message is printed.
"""

import os
import sys
from contextlib import suppress

_VARIABLES = ("PYKEOPS_VERBOSE", "KEOPS_VERBOSE")

if "pykeops" not in sys.modules and not any(name in os.environ for name in _VARIABLES):
    os.environ.update(dict.fromkeys(_VARIABLES, "0"))  # each of its two packages reads its own
    try:
        with suppress(ImportError):
            import pykeops.torch

            pykeops.set_verbose(True)  # what it compiles later is still reported
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
