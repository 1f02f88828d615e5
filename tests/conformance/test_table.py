"""The table says nothing that is not so, and leaves out nothing that is there."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from starlette.routing import Route
from tritonclient.grpc import model_config_pb2 as untyped_model_config_pb2
from tritonclient.grpc import service_pb2 as untyped_service_pb2

from executor.settings import ExecutorSettings
from executor.workers import first_batch
from gateway.rest.app import build_app
from gateway.rest.openapi import PATH
from gateway.settings import GatewaySettings
from shared.settings import settings_fields
from tests.conformance import readme
from tests.conformance.rows import KINDS, ROOT, Row, all_rows, is_compared, literals, pieces, unsaid
from tests.markdown_pages import headings_of, table_rows
from tests.symbols import symbols

service_pb2: Any = untyped_service_pb2
model_config_pb2: Any = untyped_model_config_pb2
ROWS = all_rows()


def label(row: Row) -> str:
    return f"{row.section} {row.name[:50]}"


@functools.cache
def names_of_tests(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"^ *(?:async )?def (\w+)", (ROOT / path).read_text(), re.MULTILINE))


def faults(row: Row) -> list[str]:
    found: list[str] = []
    if row.kind not in KINDS:
        found.append(f"kind {row.kind!r}")
    if not row.does or not row.where or not row.tests:
        found.append("does, where or tests is empty")
    for where in row.where:
        path, _, symbol = where.partition(":")
        if not (ROOT / path).is_file():
            found.append(f"no file {path}")
        elif symbol and symbol not in symbols(path):
            found.append(f"no {symbol} in {path}")
    for test in row.tests:
        path, _, name = test.partition("::")
        if not (ROOT / path).is_file():
            found.append(f"no file {path}")
        elif name.partition("[")[0] not in names_of_tests(path):
            found.append(f"no test {name} in {path}")
    if row.kind == "message" and not row.differs and not row.refused:
        found += [f"neither in the code nor in a test: {piece!r}" for piece in unsaid(row)]
    if row.kind == "message" and not row.differs and not row.refused and not is_compared(row):
        found.append("its tests compare it with nothing")
    return found


def test_every_row_is_true() -> None:
    wrong = {label(row): found for row in ROWS if (found := faults(row))}

    assert not wrong, "\n".join(f"{name}: {'; '.join(found)}" for name, found in wrong.items())


def test_no_row_stands_twice() -> None:
    keys = [(row.section, row.kind, row.name) for row in ROWS]

    assert len(set(keys)) == len(keys), sorted({f"{k}" for k in keys if keys.count(k) > 1})


def test_the_readme_is_what_the_table_says() -> None:
    assert readme.README.read_text() == readme.document(), "run: python -m tests.conformance.readme"


def named(kind: str) -> str:
    """All names of rows of one kind, for searching."""
    return "\n".join(row.name for row in ROWS if row.kind == kind)


MESSAGES = (
    "ModelSequenceBatching", "ModelDynamicBatching", "ModelQueuePolicy", "ModelConfig", "ModelInput", "ModelOutput",
    "ModelInstanceGroup", "ModelVersionPolicy", "ModelWarmup", "BatchInput", "BatchOutput", "ModelResponseCache",
    "ModelTransactionPolicy", "ModelEnsembling",
)  # fmt: skip


def field_names() -> list[str]:
    def inner(descriptor: Any) -> list[str]:
        return [
            *(field.name for field in descriptor.fields),
            *(
                name
                for nested in descriptor.nested_types
                if not nested.name.endswith("Entry")
                for name in inner(nested)
            ),
        ]

    return sorted(
        {
            f"{name}.{field}"
            for name in MESSAGES
            for field in inner(model_config_pb2.DESCRIPTOR.message_types_by_name[name])
        }
    )


def test_every_field_of_a_configuration_has_a_row() -> None:
    rows = named("field")
    without = [name for name in field_names() if not re.search(rf"\b{name.split('.')[1]}\b", rows)]

    assert not without


def test_every_rpc_has_a_row() -> None:
    (service,) = service_pb2.DESCRIPTOR.services_by_name.values()
    rows = named("rpc")

    assert not [method.name for method in service.methods if not re.search(rf"\b{method.name}\b", rows)]


def named_endpoints() -> set[str]:
    """Every method and path that rows name: "GET, POST /a[/b]" is four."""
    found: set[str] = set()
    for row in ROWS:
        if row.kind == "endpoint":
            methods, _, path = row.name.rpartition(" ")
            for form in (re.sub(r"\[(.*?)\]", r"\1", path), re.sub(r"\[.*?\]", "", path)):
                found |= {f"{method} {form}" for method in methods.split(", ")}
    return found


def test_every_route_has_a_row_and_every_row_a_route() -> None:
    """But for the routes about sequences and the document of all, which Triton has not."""
    nobody = MagicMock()
    app = build_app(nobody, nobody, nobody, nobody, nobody, nobody, nobody, nobody, {})
    routes = {
        f"{method} {re.sub(r':[a-z]+}', '}', route.path)}"
        for route in app.routes
        if isinstance(route, Route) and "/sequences" not in route.path and route.path != PATH
        for method in route.methods or ()
    }

    assert routes == named_endpoints()


METRIC_SOURCES = ("gateway/models/metric_families.py", "shared/statistics/metrics_config.py")


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    """Names that stand alone in a literal."""
    made = [
        literals(ROOT / path) for path in ("gateway/models/metric_families.py", "shared/statistics/metrics_config.py")
    ]
    metrics = set(re.findall(r"^nv_\w+$", "\n".join(made), re.MULTILINE))

    assert metrics == {row.name for row in ROWS if row.kind == "metric"}


def test_every_debug_variable_has_a_row() -> None:
    assert {first_batch.REQUESTS_VARIABLE, first_batch.BACKLOG_VARIABLE} <= {
        row.name for row in ROWS if row.kind == "variable"
    }
    read = set(re.findall(r"\bTRITONSERVER_\w+SCHEDULER\b", literals(ROOT / "executor/workers/first_batch.py")))
    assert read <= set(named("variable").split())


def test_every_option_that_is_not_refused_is_there() -> None:
    known = {
        f"--{name.replace('_', '-')}"
        for settings in (GatewaySettings, ExecutorSettings)
        for name in settings_fields(settings)
    }
    served = "\n".join(row.name for row in ROWS if row.kind == "option" and not row.refused)
    asked = set(re.findall(r"--[\w-]+", served))

    assert asked
    assert asked <= known


# -- docs/triton ------------------------------------------------------------------------------------------------------

PAGES = ROOT / "docs" / "triton"
PAGES_OF_TRITON = sorted(PAGES.glob("behaviour*.md"))
NUMBER = re.compile(r"\d+(?:\.\d+)?")
LEAD = re.compile(r"^[ \t]*(?:#|--)?[ \t]*", re.MULTILINE)
"""What stands before the text of a comment's line."""
TITLES = r"(?:,? \([^()]*\)|, \"[^\"]*\")?"
CITATION = re.compile(
    rf"triton-spec (?:sections? )?(\d+(?:\.\d+)?{TITLES}(?:(?:, | and | to |-)\d+(?:\.\d+)?{TITLES})*)"
)
"""`triton-spec 1.3`, `triton-spec sections 1.1, 3.1-3.3 and 4`, `triton-spec section 4, "IO messages"`."""
CITATIONS_MIN = 100
"""So many at least are found where the pattern is right."""


def numbered_sections() -> frozenset[str]:
    """The numbers with which headings of docs/triton begin."""
    numbers = (re.match(r"(\d+(?:\.\d+)*)\.? ", heading) for heading in headings_of(PAGES_OF_TRITON))
    return frozenset(number[1] for number in numbers if number)


def cited() -> list[tuple[str, str]]:
    """What code, tests, scripts and tables cite: the path of the file, and a section's number or a title."""
    found: list[tuple[str, str]] = []
    for path in sources(".py", ".lua", ".toml"):
        text = " ".join(LEAD.sub("", path.read_text()).split())
        for match in CITATION.finditer(text):
            numbers = NUMBER.findall(re.sub(TITLES, "", match[1]))
            found += [(str(path), name) for name in (*numbers, *re.findall(r"\"(.*?)\"", match[1]))]
    return found


def sources(*suffixes: str) -> list[Path]:
    """Files of the services and their tests."""
    folders = ("gateway", "scheduler", "executor", "shared", "deploy", "tests")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]


def test_what_is_cited_of_triton_is_a_heading_of_its_pages() -> None:
    """Numbers, and titles in quotation marks behind them."""
    citations = cited()
    headings = numbered_sections() | {*headings_of(PAGES_OF_TRITON)}

    assert not [(path, name) for path, name in citations if name not in headings]
    assert len(citations) >= CITATIONS_MIN


def test_sections_of_the_table_are_headings_and_no_heading_stands_twice() -> None:
    headings = [heading for heading in headings_of(PAGES_OF_TRITON) if re.match(r"\d", heading)]

    assert {row.section for row in ROWS} - {"dialect"} <= numbered_sections()
    assert (PAGES / "dialect.md").is_file()
    assert len(headings) == len(numbered_sections())


def test_pages_of_triton_that_are_named_are_there() -> None:
    """And no document is cited that is not part of the repository."""
    texts = {str(path): path.read_text() for path in sources(".py", ".lua", ".toml", ".md")}
    named = {(path, name) for path, text in texts.items() for name in re.findall(r"docs/triton/[\w-]+\.md", text)}

    assert named
    assert not {(path, name) for path, name in named if not (ROOT / name).is_file()}
    assert not [path for path, text in texts.items() if re.search(r"\bDESIGN(?:\.md\b| \d)", text)]


def test_every_message_and_metric_stands_in_the_pages() -> None:
    text = " ".join("\n".join(path.read_text() for path in PAGES_OF_TRITON).split())
    told = [row for row in ROWS if row.kind in ("message", "metric") and row.section != "dialect"]

    assert told
    assert not [row.name for row in told if any(piece not in text for piece in pieces(row))]


def named_differences() -> list[tuple[str, str]]:
    """Section and pattern of every row that docs/triton/differences.md names in the last column of its tables."""
    cells = [cells[3] for cells in table_rows((PAGES / "differences.md").read_text()) if len(cells) == 4]
    return [(section, pattern) for cell in cells for section, pattern in re.findall(r"([\d.]+) `([^`]+)`", cell)]


def is_named(row: Row, section: str, pattern: str) -> bool:
    return row.section == section and re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), row.name) is not None


def test_the_page_of_differences_names_every_row_that_differs_and_no_other() -> None:
    named = named_differences()
    differing = [row for row in ROWS if row.differs]

    assert not [label(row) for row in differing if not any(is_named(row, *each) for each in named)]
    assert not [each for each in named if not any(is_named(row, *each) for row in differing)]
    assert len(named) == len({*named})
