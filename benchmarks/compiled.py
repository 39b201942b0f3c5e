"""What the compiler makes of the Triton kernels, without a device: registers, spills and shared memory.

    python benchmarks/compiled.py [--quick]

Every kernel is compiled ahead of time for compute capabilities 8.0, 9.0 and 10.0; registers and bytes of stack (spilled
registers) are read from the binary.  Nothing is run, so this says nothing about seconds.  Writes
benchmarks/results/compiled.json and compiled.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel

import common
from sketchgp.operators.engines.triton import launch
from sketchgp.operators.expression import recognise

RESULTS = Path(__file__).parent / "results"
CAPABILITIES = [80, 90, 100]
KERNELS = {"rbf": RBFKernel, "matern32": lambda: MaternKernel(nu=1.5), "rq": RQKernel}
NAMES = ("kernel", "features", "columns", "precision", "what")
TYPES = {torch.float32: "fp32", torch.float64: "fp64"}


def launched(name: str, p: int, t: int, precision: str, what: str) -> dict[str, Any]:
    """What the engine would launch: the plan and the arguments."""
    kernel = ScaleKernel(KERNELS[name]()).requires_grad_(True)
    x = torch.randn(256, p).requires_grad_()
    expression = recognise(kernel)
    prepared = expression.prepare(x, x, True, torch.Size(), torch.float32, x.median(dim=0, keepdim=True).values)
    found: dict[str, Any] = {}

    class Recorder:
        def __init__(self, plan: Any, gradient: bool) -> None:
            found.setdefault("plan", plan)

        def __getitem__(self, grid: Any) -> Any:
            return lambda **arguments: found.setdefault("arguments", arguments)

    real = launch.compiled
    launch.compiled = Recorder
    try:
        left, right = torch.randn(256, t), torch.randn(256, t)
        if what == "gradient":
            launch.differentiate(expression, prepared, left, right, True, precision)
        else:
            launch.multiply(expression, prepared.converted(torch.Tensor.detach), 256, right, True, precision)
    finally:
        launch.compiled = real
    return found


def compile_for(capability: int, plan: Any, gradient: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Registers, stack and shared memory of a kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = launch.compiled(plan, gradient)
    options = {name: arguments[name] for name in ("num_warps", "num_stages")}
    signature, constants, aligned = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        value = arguments[name]
        if torch.is_tensor(value):
            signature[name] = f"*{TYPES[value.dtype]}"
            aligned[(place,)] = [["tt.divisibility", 16]]
        elif name in ("BM", "BN"):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i32"
    source = ASTSource(function, signature, constants, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tensor = getattr(kernel.metadata, "tmem_size", None) or 0
    return {**usage(kernel.asm["cubin"]), "shared": kernel.metadata.shared, "tensor_memory": tensor}


def usage(binary: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, from a binary for a device."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack, local = (
        max(int(value) for value in re.findall(rf"\b{name}:(\d+)", text)) for name in ("REG", "STACK", "LOCAL")
    )
    return {"registers": registers, "spilled": stack + local}


def cases(quick: bool) -> list[tuple[str, int, int, str, str]]:
    """Kernel, features, right-hand sides, precision, and whether it is a product or a gradient."""
    if quick:
        return [("rbf", 20, 16, "float32", "product")]
    found: list[tuple[str, int, int, str, str]] = []
    for precision in ("float32", "tf32"):
        for p in (8, 90):
            found += [("rbf", p, t, precision, "product") for t in (16, 64)]
        found += [("matern32", 32, 16, precision, "gradient")]
    return [*found, *((name, 8, 16, "float32", "product") for name in ("matern32", "rq"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one kernel; writes nothing")
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES, choices=CAPABILITIES)
    options = parser.parse_args()
    rows = []
    for case in cases(options.quick):
        for capability in options.capability:
            made = launched(*case)
            found = compile_for(capability, made["plan"], case[4] == "gradient", made["arguments"])
            row = {**dict(zip(NAMES, case, strict=True)), "capability": capability / 10}
            blocks = tuple(made["arguments"][name] for name in ("BM", "BN", "num_warps", "num_stages"))
            rows.append({**row, "blocks": blocks, **found})
            print(rows[-1], flush=True)
    if not options.quick:
        common.write_json(RESULTS / "compiled.json", {"machine": common.machine("triton"), "kernels": rows})
        (RESULTS / "compiled.md").write_text(report(rows), encoding="utf-8")


def report(rows: list[dict[str, Any]]) -> str:
    """The table."""
    heads = [*NAMES, "capability", "blocks", "registers", "spilled", "shared"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        blocks = f"{row['blocks'][0]} x {row['blocks'][1]}, {row['blocks'][2]} warps"
        cells = [*(row[name] for name in NAMES), row["capability"], blocks]
        cells += [row["registers"], row["spilled"], row["shared"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
