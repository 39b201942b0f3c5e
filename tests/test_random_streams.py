"""Every draw has a stream of its own: none equals what ``torch.manual_seed`` gives, or what another purpose draws."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import torch

from sketchgp.random_streams import generator, salted

SOURCE = Path(__file__).resolve().parents[1] / "src" / "sketchgp"


def test_streams_differ_by_seed_and_purpose_and_from_torch() -> None:
    drawn = {
        (seed, purpose): torch.randperm(1000, generator=generator(seed, purpose))
        for seed in (0, 1, -1, 2**70)
        for purpose in ("blocks", "rows")
    }
    plain = [torch.randperm(1000, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    found = [*drawn.values(), *plain]
    assert len({tuple(order.tolist()) for order in found}) == len(found)
    assert torch.equal(drawn[0, "rows"], torch.randperm(1000, generator=generator(0, "rows")))
    assert salted(0, "rows") == 0x6561FEF42F34461E  # on every platform, for ever: seeds reproduce what they once gave


def test_all_random_numbers_come_from_streams_with_a_purpose_of_their_own() -> None:
    purposes: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert path.name == "random_streams.py" or not called.endswith((".Generator", ".manual_seed")), path
            if called in ("generator", "salted"):
                purposes[ast.unparse(node.args[1])] += 1
    repeated = [purpose for purpose, count in purposes.items() if count > 1 and purpose != "purpose"]
    assert len(purposes) > 15 and not repeated
