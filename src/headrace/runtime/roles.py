"""Entry point of child processes: `python -m headrace.runtime.roles worker|admin`."""

import gc
import sys

import msgspec


def main() -> int:
    """Read the orders, run the role, return its exit status."""
    role = sys.argv[1] if len(sys.argv) == 2 else ""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1  # whoever was about to give the orders is gone
    if role == "worker":
        from headrace.worker.process import WorkerOrders, run_worker

        orders = msgspec.json.decode(line, type=WorkerOrders)
        gc.freeze()
        return run_worker(orders)
    if role == "admin":
        from headrace.admin.run import AdminSettings, run_admin

        return run_admin(msgspec.json.decode(line, type=AdminSettings))
    print(f"unknown role {role!r}: worker or admin", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
