"""Writes tests/goldens/{glm_moe_dsa,families}.npz: what transformers computes on the random checkpoints of the tests.

Needs the extra `oracle`. Run from the repository root:

    PYTHONPATH=.:tests:validation python validation/goldens/make_transformers_goldens.py

Weights come from seeds (tests/oracles/random_glm.py, random_families.py), so the files hold only results: per case the logits, each
sparse layer's chosen experts (ascending) and their weights, where there is an MTP block its logits, and for the families the names
and shapes of the checkpoint that transformers writes. The margins printed beside each case (smallest gap at the edge of the experts' and
of the positions' choice) must stay well above the two frameworks' difference, or equality of choices would be luck.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import numpy as np
import torch
from goldens import upstream
from oracles import random_families, random_glm

SMALLEST_MARGIN = 1e-5


def run_case(name: str, raw: dict[str, Any], params: upstream.Arrays, tokens: np.ndarray) -> upstream.Arrays:
    """All goldens of one case.

    Raises:
        SystemExit: a choice was too close.
    """
    results, margin = upstream.run(raw, params, tokens)
    print(f"{name}: {len(tokens)} tokens, largest logit {np.abs(results['logits']).max():.2f}, margin {margin:.1e}")
    if margin <= SMALLEST_MARGIN:
        raise SystemExit(f"{name}: choose another seed")
    return results


def glm_goldens() -> upstream.Arrays:
    """Of tests/oracles/random_glm.py, as "case/result"."""
    return {
        f"{case}/{name}": array
        for case in range(random_glm.N_CASES)
        for name, array in run_case(
            f"case {case:2d}", random_glm.hf_config(case), random_glm.params_of(case), random_glm.tokens_of(case)
        ).items()
    }


def family_goldens() -> upstream.Arrays:
    """Of tests/oracles/random_families.py, as "case/result"; "case/shapes" is JSON in bytes."""
    goldens = {}
    for case in random_families.CASES.values():
        params = case.params()
        results = run_case(case.name, case.config, params, case.tokens)
        shapes = json.dumps(upstream.saved_shapes(case.config, params))
        results["shapes"] = np.frombuffer(shapes.encode(), np.uint8)
        goldens |= {f"{case.name}/{name}": array for name, array in results.items()}
    return goldens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/goldens"), help="directory")
    parser.add_argument("--only", choices=("glm_moe_dsa", "families"), help="one of the two files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in (("glm_moe_dsa", glm_goldens), ("families", family_goldens)):
        if args.only in (None, name):
            out = args.out / f"{name}.npz"
            np.savez_compressed(out, **make())
            print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
