"""How long a start takes and what it holds: python -m benchmarks.startup. Prints one JSON object."""

import json
import tempfile
from pathlib import Path

from benchmarks.servers import children, headrace, resident_mb


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        starts = []
        for name in ("first start, weights converted", "second start", "third start"):
            with headrace(data) as running:
                memory = {"gateway": resident_mb(running.pid)}
                memory |= {role: resident_mb(pid) for role, pid in children(running.pid).items()}
                starts.append({"start": name, "ready_s": round(running.ready_s, 2), "resident_mb": memory})
    print(json.dumps({"benchmark": "startup", "slots": "32 x 2048 tokens", "starts": starts}, indent=1))


if __name__ == "__main__":
    main()
