"""How fast does the simulator serve? python -m benchmarks.simulator [--requests 100000] [--policy fair] [--workers 4] [--repeats 3]

Ten tenants that together ask for a little more than the workers can do, so that many always wait. Counted is processor time
of one core: what other programs do at the same time matters little. Prints one JSON object.
"""

import argparse
import json
import time

from headrace.scheduling.policy import POLICIES, QueuePolicy
from headrace.simulate.fleet import simulate
from headrace.simulate.measure import Window, measure
from headrace.simulate.outcome import Setup
from headrace.simulate.workload import SECOND_US, Client, merged

TENANTS = 10
RATE_RPS_PER_WORKER = 1.75
"""Of 256 prompt tokens and 128 to 384 of an answer; a worker does about 1.68."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--policy", choices=POLICIES, default="fair")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rate_rps = RATE_RPS_PER_WORKER * arguments.workers
    clients = [
        Client(tenant=f"t{number}", rate_rps=rate_rps / TENANTS, is_poisson=True, output_spread=0.5)
        for number in range(TENANTS)
    ]
    arrivals = merged(clients, 1.05 * arguments.requests / rate_rps)[: arguments.requests]
    setup = Setup(
        name=arguments.policy,
        policy=QueuePolicy(name=arguments.policy),
        prediction="half",
        workers=arguments.workers,
    )
    seconds = []
    for _ in range(arguments.repeats):
        begin = time.process_time()
        outcome = simulate(setup, arrivals)
        seconds.append(time.process_time() - begin)
    begin = time.process_time()
    duration_s = arrivals[-1].arrival_us / SECOND_US
    step_s = max(30.0, duration_s / 200)  # as the command line does it
    figures = measure(outcome, Window(duration_s=duration_s, step_s=step_s, width_s=2 * step_s))
    measure_seconds = time.process_time() - begin
    print(
        json.dumps(
            {
                "requests": len(arrivals),
                "policy": arguments.policy,
                "workers": arguments.workers,
                "simulated_s": round(outcome.end_us / SECOND_US),
                "busy_share": figures.busy_share,
                "wait_s_p50": figures.wait_s.p50,
                "processor_s": seconds,
                "requests_per_processor_s": len(arrivals) / min(seconds),
                "measure_processor_s": measure_seconds,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
