"""Time of norms on a CPU, forward and backward, relative to `nn.LayerNorm`.

    python benchmarks/ops.py [--threads 1] [--rounds 60] [--shapes 4096x512 ...] [--dtypes float32 ...] [--compiled]

`normkit_papers.norm_speed` measures; this script adds the targets and writes the file. Norms are measured after their
warm-up. Run it on a quiet machine, with the settings of the Makefile (OMP_WAIT_POLICY, MALLOC_*).
`--compiled` adds every norm compiled by Inductor (it needs a C++ compiler).
"""

import sweep
from normkit_papers.norm_speed import measure

TARGETS = {  # of the ratio to nn.LayerNorm
    "layer": 1.0, "rms": 1.0, "scale": 1.0, "power(groups=0)": 1.0, "power": 1.0, "pnv": 1.2, "batch": 1.2,
    "un": 1.5, "mabn": 1.5, "renorm": 1.5,
}  # fmt: skip
INFERENCE = 0.8  # target of an unfolded norm with frozen statistics


def main() -> None:
    """Measure and write."""
    parser = sweep.parser(__doc__, "ops_cpu.csv")
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    sweep.begin(args.threads)
    rows = []
    for shape in args.shapes:
        for kind in args.dtypes:
            n, dim = map(int, shape.split("x"))
            for row in measure(tuple(TARGETS), n, dim, kind, args.rounds, compiled=args.compiled, threads=args.threads):
                ours = row["provider"] != "torch"
                row["target"] = "" if not ours else TARGETS[row["norm"]] if row["pass"] == "train" else INFERENCE
                rows.append(row)
                print("  ".join(f"{value!s:>10s}" for value in list(row.values())[3:]), flush=True)
    sweep.keep(args.out, tuple(rows[0]), rows)


if __name__ == "__main__":
    main()
