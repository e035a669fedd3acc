"""Takes the digits that ship with the package out of scikit-learn.

    python docs/figures/digits.py

The same arrays give the same file again.
"""

from pathlib import Path

import numpy as np

TARGET = Path(__file__).parents[2] / "src" / "vitrail" / "assets" / "digits.npz"


def write(target: Path) -> None:
    """Ink from 0 to 16 as [1797, 8, 8], and what was written [1797]."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    np.savez_compressed(target, ink=loaded.images.astype(np.uint8), labels=loaded.target.astype(np.uint8))


if __name__ == "__main__":
    write(TARGET)
