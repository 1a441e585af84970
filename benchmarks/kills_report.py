"""What `benchmarks.kills` says of its kills, and whether they were the kills that it promised."""

import statistics
from collections import Counter

from benchmarks.kills_evidence import PHASES, Kill
from benchmarks.kills_load import Chat

IN_FLIGHT_MIN = 8
HITS_MIN = 5
"""Of a run of sixty, so many kills have to hit each phase with each victim."""


def line(kill: Kill, chats: list[Chat]) -> str:
    """What was seen at a kill, right after it."""
    told = Counter(
        "answered" if chat.is_answered else chat.error_code or "cut" for chat in chats if chat.is_over
    )
    return (
        f"kill {kill.number:2} {kill.victim:6} aimed at {kill.aimed:8} clients waiting {kill.clients_waiting:2}"
        f"  back after {kill.recovery_s:4.1f} s  clients: {dict(told)}"
    )


def show(kills: list[Kill]) -> None:
    """All kills with the operations that they found open."""
    print("\nOperations open at each kill, by phase, from progress files and journal:")
    print(f"{'kill':>4} {'victim':7} {'aimed':9}" + "".join(f"{phase:>10}" for phase in PHASES) + "  hit")
    for kill in kills:
        counts = "".join(f"{kill.phases[phase]:>10}" for phase in PHASES)
        hit = "yes" if kill.phases[kill.aimed] else "no"
        print(f"{kill.number:>4} {kill.victim:7} {kill.aimed:9}{counts}  {hit}")
    print("\nKills that found at least one operation in the phase (aimed at and hit / all):")
    for victim in ("server", "worker"):
        cells = [f"{phase} {_hits(kills, victim, phase)}/{_found(kills, victim, phase)}" for phase in PHASES]
        print(f"{victim:7} " + "   ".join(cells))
    open_at = [kill.phases.total() for kill in kills]
    print(f"\noperations open at a kill: min {min(open_at)}, median {statistics.median(open_at):.0f}")
    for victim in ("server", "worker"):
        times = [kill.recovery_s for kill in kills if kill.victim == victim]
        if times:
            print(f"{victim} back after: median {statistics.median(times):.2f} s, longest {max(times):.2f} s")


def _hits(kills: list[Kill], victim: str, phase: str) -> int:
    return sum(one.victim == victim and one.aimed == phase and one.phases[phase] > 0 for one in kills)


def _found(kills: list[Kill], victim: str, phase: str) -> int:
    return sum(one.victim == victim and one.phases[phase] > 0 for one in kills)


def missed_by(kills: list[Kill]) -> list[str]:
    """What the trial itself did not reach."""
    missed = [
        f"kill {kill.number} found {kill.phases.total()} operations open, not {IN_FLIGHT_MIN}"
        for kill in kills
        if kill.phases.total() < IN_FLIGHT_MIN
    ]
    if len(kills) >= 60:
        missed += [
            f"only {_hits(kills, victim, phase)} kills of the {victim} hit the phase {phase} they aimed at"
            for victim in ("server", "worker")
            for phase in PHASES
            if _hits(kills, victim, phase) < HITS_MIN
        ]
    return missed
