"""The published workloads of token fairness, and what they gave there.

Sources: the logs published with "Fairness in Serving Large Language Models" (OSDI 2024), recomputed, and an
independent small simulator with the same engine timing. Each row names one figure.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from headrace.scheduling.policy import PolicyName
from headrace.simulate import tables
from headrace.simulate.measure import Figures, Window
from headrace.simulate.outcome import Prediction
from headrace.simulate.tables import Row, Run, Table


def _differences(
    published: tuple[float, float, float] | None, expected: tuple[float, float, float] | None
) -> list[Row]:
    names: tuple[Literal["max", "mean", "variance"], ...] = ("max", "mean", "variance")
    return [
        Row(
            figure=f"service difference, {name}",
            published=published[place] if published else None,
            expected=expected[place] if expected else None,
            read=tables.difference(name),
        )
        for place, name in enumerate(names)
    ]


def _per_tenant(
    what: str,
    names: Sequence[str],
    read: Callable[[int], Callable[[Figures, Figures], float]],
    published: Sequence[float | None],
    expected: Sequence[float | None] | None = None,
    bounds: dict[int, tables.Bound] | None = None,
) -> list[Row]:
    return [
        Row(
            figure=f"{what} {name}",
            published=published[place],
            expected=expected[place] if expected else None,
            bound=(bounds or {}).get(place),
            read=read(place),
        )
        for place, name in enumerate(names)
    ]


_SERVICE, _TTFT = "service/s", "TTFT mean s"
_ENOUGH = Row(figure="throughput, % of fifo", bound=(">=", 97.5), read=tables.throughput_ratio)


def _overload_run(
    name: str,
    policy: PolicyName,
    prediction: Prediction,
    *,
    difference: tuple[tuple[float, float, float], tuple[float, float, float]],
    throughput: tuple[float, float],
    accumulated: tuple[float, float],
    service: tuple[tuple[float | None, float | None], tuple[float, float]],
    ttft: tuple[tuple[float, float], tuple[float, float]],
) -> Run:
    is_fair = policy == "fair"
    rows = [
        *_differences(*difference),
        Row(
            figure="throughput tok/s", published=throughput[0], expected=throughput[1], read=tables.throughput
        ),
        Row(
            figure="accumulated difference",
            published=accumulated[0],
            expected=accumulated[1],
            bound=("<=", 12_000) if is_fair else None,
            read=tables.accumulated,
        ),
        *_per_tenant(_SERVICE, ("c1", "c2"), tables.service, *service),
        *_per_tenant(_TTFT, ("c1", "c2"), tables.ttft, *ttft),
    ]
    if is_fair:
        rows += [Row(figure="off the even share, %", bound=("<=", 5.0), read=tables.off_share), _ENOUGH]
    return Run(name=name, policy=policy, prediction=prediction, rows=rows)


OVERLOAD = Table(
    name="overload: c1 1.5 rps, c2 3 rps",
    load="overload",
    duration_s=360,
    window=Window(duration_s=600),
    runs=(
        _overload_run(
            "fifo",
            "fifo",
            "exact",
            difference=((447.37, 439.00, 30.6), (456, 423, 6269)),
            throughput=(876, 885),
            accumulated=(237_738, 240_322),
            service=((438, 876), (442, 885)),
            ttft=((337, 338), (330, 329)),
        ),
        _overload_run(
            "fair, charged as it grows",
            "fair",
            "none",
            difference=((192.88, 103.77, 6981), (231, 132, 5667)),
            throughput=(893, 885),
            accumulated=(9_050, 8_337),
            service=((687, 666), (662, 666)),
            ttft=((145, 410), (149, 418)),
        ),
        _overload_run(
            "fair, expected +-50 %",
            "fair",
            "half",
            difference=((33.98, 12.54, 112), (72, 21, 439)),
            throughput=(904, 885),
            accumulated=(1_789, 4_074),
            service=((None, None), (665, 662)),
            ttft=((145, 410), (151, 417)),
        ),
        _overload_run(
            "fair, expected exactly",
            "fair",
            "exact",
            difference=((5.87, 0.51, 1.7), (9.7, 1.5, 6)),
            throughput=(895, 885),
            accumulated=(377, 529),
            service=((None, None), (665, 663)),
            ttft=((145, 410), (151, 417)),
        ),
    ),
)


def _real_run(
    name: str,
    policy: PolicyName,
    prediction: Prediction,
    *,
    difference: tuple[tuple[float, float, float], tuple[float, float, float] | None],
    throughput: tuple[float, float | None],
    ttft: tuple[float, float],
) -> Run:
    return Run(
        name=name,
        policy=policy,
        prediction=prediction,
        rows=[
            *_differences(*difference),
            Row(
                figure="throughput tok/s",
                published=throughput[0],
                expected=throughput[1],
                read=tables.throughput,
            ),
            Row(figure="TTFT mean s", published=ttft[0], read=tables.ttft_all),
            Row(figure="TTFT p99 s", published=ttft[1], read=tables.ttft_p99),
            *([_ENOUGH] if policy == "fair" else []),
        ],
    )


REAL = Table(
    name="real trace: 27 clients, 1500 requests",
    load=tables.REAL_TRACE,
    duration_s=600,
    window=Window(duration_s=600, warm_up_s=0),
    runs=(
        _real_run(
            "fifo",
            "fifo",
            "exact",
            difference=((759.97, 433.53, 32112), (725, 395, 30567)),
            throughput=(777, 812),
            ttft=(46.8, 136.9),
        ),
        _real_run(
            "fair, charged as it grows",
            "fair",
            "none",
            difference=((368.40, 251.66, 6549), (381, 234, 6459)),
            throughput=(779, 812),
            ttft=(39.7, 211.5),
        ),
        _real_run(
            "fair, expected +-50 %",
            "fair",
            "half",
            difference=((365.47, 240.33, 5322), None),
            throughput=(773, None),
            ttft=(39.7, 210.1),
        ),
        _real_run(
            "fair, expected exactly",
            "fair",
            "exact",
            difference=((329.46, 227.51, 4476), (376, 238, 6034)),
            throughput=(781, 810),
            ttft=(40.0, 211.2),
        ),
    ),
)


def _two(
    name: str,
    load: str,
    *,
    duration_s: float = 600,
    fifo: list[Row],
    fair: list[Row],
) -> Table:
    return Table(
        name=name,
        load=load,
        duration_s=duration_s,
        window=Window(duration_s=duration_s),
        runs=(
            Run(name="fifo", policy="fifo", prediction="exact", rows=fifo),
            Run(name="fair, charged as it grows", policy="fair", prediction="none", rows=fair),
            Run(
                name="fair, expected +-50 %",
                policy="fair",
                prediction="half",
                rows=[*(row for row in fair if row.bound is not None), _ENOUGH],
            ),
        ),
    )


_THREE, _PAIR = ("c1", "c2", "c3"), ("c1", "c2")

PROPORTIONAL = _two(
    "proportional: .25, .5, 1.5 rps",
    "proportional",
    fifo=[
        *_per_tenant(_SERVICE, _THREE, tables.service, (144, 287, 859)),
        *_per_tenant(_TTFT, _THREE, tables.ttft, (106, 106, 106)),
    ],
    fair=[
        *_per_tenant(_SERVICE, _THREE, tables.service, (191, 382, 756), (191, 380, 764)),
        *_per_tenant(
            _TTFT, _THREE, tables.ttft, (5.1, 5.2, 137), (5.8, 6.5, 126), {0: ("<=", 10), 1: ("<=", 10)}
        ),
    ],
)
ON_OFF_LESS = _two(
    "on/off below the share: c1 .5 rps every other minute, c2 2 rps",
    "on-off-less",
    fifo=[
        *_per_tenant(_SERVICE, _PAIR, tables.service, (142, 1177)),
        *_per_tenant(_TTFT, _PAIR, tables.ttft, (103, 102)),
    ],
    fair=[
        *_per_tenant(_SERVICE, _PAIR, tables.service, (176, 1146)),
        *_per_tenant(_TTFT, _PAIR, tables.ttft, (4.0, 112), None, {0: ("<=", 10)}),
    ],
)
ON_OFF_OVERLOAD = _two(
    "on/off above the share: c1 2 rps every other minute, c2 3 rps",
    "on-off-overload",
    fifo=[
        *_per_tenant(_SERVICE, _PAIR, tables.service, (321, 993)),
        *_per_tenant(_TTFT, _PAIR, tables.ttft, (453, 453)),
    ],
    fair=[
        *_per_tenant(_SERVICE, _PAIR, tables.service, (660, 659), (676, 654)),
        *_per_tenant(_TTFT, _PAIR, tables.ttft, (85, 558), (80, 551)),
        Row(figure="off the even share, %", bound=("<=", 5.0), read=tables.off_share),
    ],
)
SHORT_LONG = _two(
    "short against long: 8 rps of 64/64, 1.5 rps of 256/256",
    "short-long",
    fifo=[
        *_per_tenant(_SERVICE, ("long", "short"), tables.service, (938, 1312), (985, 1338)),
        Row(figure="throughput tok/s", published=1475, read=tables.throughput),
    ],
    fair=[
        *_per_tenant(_SERVICE, ("long", "short"), tables.service, (1015, 1022), (1039, 1042)),
        *_per_tenant(_TTFT, ("long", "short"), tables.ttft, (50, 146)),
        Row(figure="throughput tok/s", published=1445, expected=1474, read=tables.throughput),
        Row(figure="off the even share, %", bound=("<=", 5.0), read=tables.off_share),
    ],
)
_WEIGHTED = ("w1", "w2", "w3", "w4")
WEIGHTED = _two(
    "weighted 1:2:3:4, all backlogged",
    "weighted",
    fifo=_per_tenant(_SERVICE, _WEIGHTED, tables.service, (None, None, None, None)),
    fair=[
        *_per_tenant(_SERVICE, _WEIGHTED, tables.service, (135, 271, 406, 541), (128, 264, 402, 535)),
        Row(figure="off the weighted share, %", bound=("<=", 5.0), read=tables.off_share),
    ],
)

TABLES = (OVERLOAD, REAL, PROPORTIONAL, ON_OFF_LESS, ON_OFF_OVERLOAD, SHORT_LONG, WEIGHTED)
