"""Both formats of a page, read by Prometheus' own parsers; and who gets which."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.openmetrics import parser
from prometheus_client.parser import text_string_to_metric_families as read_text

from gateway.models.exposition import Family, ShownExemplar, wants_openmetrics
from shared.statistics.reports import Sample

untyped: Any = parser
HARD = 'a "quote", a \\ and\na line'
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
FAMILIES = [
    Family("nv_count", "counter", HARD, [Sample("", {"tag": HARD}, 2)]),
    Family("own_total", "counter", "t", [Sample("", {}, 3)]),
    Family("level", "gauge", "t", [Sample("", {}, float("nan"))]),
    Family(
        "took_seconds",
        "histogram",
        "t",
        [
            Sample("_bucket", {"le": "1"}, 1),
            Sample("_bucket", {"le": "+Inf"}, 2),
            Sample("_sum", {}, 4.5),
            Sample("_count", {}, 2),
        ],
        {1: ShownExemplar("ab" * 16, "cd" * 8, 4.25, 1700000000.5)},
    ),
]


def test_openmetrics_keeps_names_and_has_exemplars() -> None:
    text = "\n".join(line for family in FAMILIES for line in family.openmetrics_lines()) + "\n# EOF\n"

    count, own, _, took = untyped.text_string_to_metric_families(text)

    assert ("nv_count", "unknown", HARD) == (count.name, count.type, count.documentation)
    assert ("nv_count", {"tag": HARD}, 2.0) == count.samples[0][:3]
    assert ("own", "counter", "own_total") == (own.name, own.type, own.samples[0].name)
    assert ["1.0", "+Inf"] == [sample.labels["le"] for sample in took.samples[:2]]
    exemplar = took.samples[1].exemplar
    assert exemplar is not None
    assert ({"trace_id": "ab" * 16, "span_id": "cd" * 8}, 4.25) == (exemplar.labels, exemplar.value)
    assert took.samples[0].exemplar is None


def test_the_text_format_has_no_exemplars_and_stays_as_it_is() -> None:
    lines = [line for family in FAMILIES for line in family.lines()]

    assert 'took_seconds_bucket{le="+Inf"} 2' in lines
    assert 'took_seconds_bucket{le="1"} 1' in lines
    assert 4 == len(list(read_text("\n".join(lines) + "\n")))


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (PROMETHEUS, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ("text/plain, Application/OpenMetrics-Text; version=1.0.0", True),
        ("application/openmetrics-text; version=0.0.1", True),
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("application/openmetrics-text;version=2.0.0,text/plain;q=0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.2, text/plain;q=0.9", False),
        ("application/openmetrics-text;q=x", False),
        (";;=,=;q", False),
    ],
)
def test_openmetrics_is_for_those_who_ask(accept: str, wanted: bool) -> None:
    assert wanted is wants_openmetrics(accept)
