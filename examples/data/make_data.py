"""Makes the two .smtx files beside it, always the same bytes.  Run: ``python examples/data/make_data.py``"""

from pathlib import Path

import magicube_cutlass as mc

HERE = Path(__file__).resolve().parent
FILES = {  # rows of vectors, columns, sparsity, distribution of row lengths
    "uniform_64x512_0.9.smtx": (64, 512, 0.9, "uniform"),
    "skewed_96x384_0.8.smtx": (96, 384, 0.8, "skewed"),
}


def main() -> None:
    for name, (rows, cols, sparsity, distribution) in FILES.items():
        pattern = mc.random_pattern(rows, cols, sparsity, 1, distribution, seed=7)  # type: ignore[arg-type]
        mc.write_smtx(HERE / name, pattern)
        print(f"{name}: {pattern}")


if __name__ == "__main__":
    main()
