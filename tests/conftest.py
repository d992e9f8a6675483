"""Settings that must be made before anything is imported.

Triton's kernels run in its interpreter, on CPU tensors, also where there is a GPU: what a real one
computes is checked by benchmarks/gpu_check.py.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
