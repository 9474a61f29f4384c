"""Writes `llama_<name>.npz`: the outputs of Hugging Face's models that tests/model/test_llama.py compares with.

Run in an environment with torch and transformers (the versions are stored in the files):

    python tests/golden/make_llama_golden.py [NAME …]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from llama_reference import reference_outputs
from llama_weights import NAMES, checksum, llama_weights


def main() -> None:
    """Writes one file for each tiny model beside this script."""
    torch.manual_seed(0)
    for name in sys.argv[1:] or NAMES:
        outputs = reference_outputs(name)
        path = Path(__file__).parent / f"llama_{name}.npz"
        np.savez_compressed(
            path,
            weights_checksum=checksum(llama_weights(name)),
            made_with=f"torch {torch.__version__}, transformers {transformers.__version__}",
            **outputs,
        )
        gradients = [np.abs(value).max() for key, value in outputs.items() if key.startswith("grad:")]
        print(
            f"{path.name}: {path.stat().st_size} bytes, loss {outputs['loss']:.6f}, largest gradient of a leaf"
            f" {min(gradients):.2e} to {max(gradients):.2e}"
        )


if __name__ == "__main__":
    main()
