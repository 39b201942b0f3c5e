"""Rates of exponential, root and logarithm on a CUDA device with operands in registers, by Triton.

torch reads and writes device memory for every call, so its elementwise rates are those of the memory; a kernel that
forms distances, exponentials and the product in one go is held back only by the arithmetic.  Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from matvec_limit import seconds_a_call

# Each step maps the interval (0, 1] into itself, so that nothing overflows or is optimised away.
GROUPS = {"exponential": 0, "root": 1, "logarithm": 2}


@triton.jit
def _chain(out, STEPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, DOUBLE: tl.constexpr):
    """``STEPS`` dependent function calls on each of BLOCK numbers; independent across numbers."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = (index % 1000).to(tl.float32) * 0.0009 + 0.05
    if DOUBLE:
        x = x.to(tl.float64)
    for _ in range(STEPS):
        if GROUP == 0:
            x = tl.exp2(-x)  # stays in [0.5, 1]
        elif GROUP == 1:
            x = tl.rsqrt(x + 1.0)
        else:
            x = tl.log2(x + 1.0)
    tl.store(out + index, x)


def register_rates(dtype: torch.dtype, device: torch.device, programs: int = 0, steps: int = 4096) -> dict:
    """Operations a second by group, in the form ``{"exponential": {"how": rate}, ...}``."""
    block = 1024
    if not programs:
        programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(programs * block, dtype=dtype, device=device)
    names = {"exponential": "exp2", "root": "rsqrt", "logarithm": "log2"}
    found: dict[str, dict[str, float]] = {}
    for group, number in GROUPS.items():

        def call(number: int = number) -> None:
            _chain[(programs,)](out, steps, GROUP=number, BLOCK=block, DOUBLE=dtype == torch.float64)

        seconds = seconds_a_call(call, device, 7)
        found[group] = {f"Triton {names[group]} in registers": out.numel() * steps / seconds}
    return found
