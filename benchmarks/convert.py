"""Conversion of weights: exactness over layouts, time and memory at real sizes, and another converter beside ours.

    python benchmarks/convert.py
    python benchmarks/convert.py --parts exact
    python benchmarks/convert.py --parts sizes --sizes 0.5B "32B width, 2 layers" --folder /scratch

Parts:
  exact  tiny Qwen2 (tied), Qwen2.5 (untied, 150 rows) and Qwen3 (head size of its own), bf16 and fp32: Hugging Face
         folder -> running layout -> folder, bit for bit, and its logits against transformers' in fp32 (bar 1e-4); and
         folder -> checkpoint -> folder
  sizes  random bf16 weights of real sizes by `megarl convert`, in both directions, in turn with `cp` of the same files
         and a sync (each from a warm cache; the least time of two rounds counts). Bars: twice the time of `cp`, the
         start of Python included; memory below 4 GiB, and at 8 layers of the 32B width at most 1.2 times that at 2
         layers; equal bit for bit
  peers  the same models into a running layout and out again, by ours and by mbridge, in turn. Bars: no slower, equal
         bit for bit. megatron-bridge can't run here: it needs CUDA's Transformer Engine
"""

import argparse
import tempfile
from pathlib import Path

import convert_exact
import convert_peers
import convert_sizes
from common import finish

PARTS = ("exact", "sizes", "peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    sizes = convert_sizes.SIZES
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=sizes,
        default=list(sizes),
        metavar="NAME",
        help=f"of part sizes: of {', '.join(sizes)} (all)",
    )
    parser.add_argument("--folder", type=Path, help="scratch space, up to 35 GB (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    run = {
        "exact": convert_exact.main,
        "sizes": lambda scratch: convert_sizes.main(args.sizes, scratch),
        "peers": convert_peers.main,
    }
    figures, passed, numbers = [], True, {}
    for part in args.parts:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            print(f"\n{part}", flush=True)
            figure, good, numbers[part] = run[part](Path(scratch))
        figures.append(f"{part}: {figure}")
        passed = passed and good
    finish("; ".join(figures), passed, numbers, args.json)


if __name__ == "__main__":
    main()
