"""Run all benchmarks, one after the other, and keep their results: python -m benchmarks [NAME …].

Each is also a module of its own with options (`python -m benchmarks.engine --help`). Run them alone on a
quiet machine. Results go to benchmarks/results/NAME.json.
"""

import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
NAMES = (
    "loop_cost",
    "fair_queue",
    "ledger_commit",
    "admission",
    "startup",
    "gateway",
    "engine",
    "prefix",
    "overload",
    "static_batch",
)


def main() -> int:
    names = sys.argv[1:] or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"--- {name}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}"], stdout=subprocess.PIPE, check=False
        )
        if done.returncode != 0:
            return done.returncode
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_bytes(done.stdout)
        print(done.stdout.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
