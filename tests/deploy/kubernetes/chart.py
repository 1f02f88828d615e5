"""The chart, as Helm itself renders and judges it: Helm's Go library, in a process of its own.

Go's runtime has signal handlers and threads of its own; the process of the tests shall not have them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from tests.markdown_pages import ROOT

CHART = ROOT / "deploy" / "helm" / "seqmesh"
RELEASE = "seqmesh"
NAMESPACE = "mesh"
PROGRAM = """
import json, sys
from helm_python import Chart, lint
from helm_python.errors import HelmError
path, questions = json.load(sys.stdin)
def answer(options, values):
    try:
        chart.validate_schema(values)
        return {"files": chart.render(values, **options), "lint": lint(path, values, strict=True)}
    except HelmError as error:
        return {"refused": str(error)}
with Chart.load(path) as chart:
    json.dump([answer(*question) for question in questions], sys.stdout)
"""
_answers: dict[str, dict[str, Any]] = {}


class RefusedValuesError(Exception):
    """Helm renders nothing; the message is what it says."""


def rendered(values: Mapping[str, Any], *, name: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
    """The chart's objects with these values, by the names of their templates, without those that are empty.

    Raises RefusedValuesError for values that the schema or a template refuses. Whatever `helm lint --strict` complains
    of fails the test.
    """
    files = said_of(values, name, namespace)["files"]
    found = {path.rsplit("/", 1)[1]: text.strip() + "\n" for path, text in files.items() if path.endswith(".yaml")}
    return {name: text for name, text in found.items() if any(yaml.safe_load_all(text))}


def notes(values: Mapping[str, Any], *, name: str = RELEASE, namespace: str = NAMESPACE) -> str:
    """What whoever installs the chart reads then. Raises as `rendered`."""
    return said_of(values, name, namespace)["files"]["seqmesh/templates/NOTES.txt"]


def said_of(values: Mapping[str, Any], name: str, namespace: str) -> dict[str, Any]:
    """What Helm makes of these values, and says of them. Raises RefusedValuesError."""
    question = question_of(values, name, namespace)
    if question not in _answers:
        ask([question])
    said = _answers[question]
    if "refused" in said:
        raise RefusedValuesError(said["refused"])
    # 2 is a warning. An icon is recommended (1), and none of these values is about it.
    assert [] == [message for message in said["lint"]["messages"] if message["severity"] > 1]
    return said


def question_of(values: Mapping[str, Any], name: str = RELEASE, namespace: str = NAMESPACE) -> str:
    """What PROGRAM is asked for these values, as JSON."""
    return json.dumps([{"name": name, "namespace": namespace}, values])


def ask(questions: Iterable[str]) -> None:
    """Has all of them answered by one process; it takes a second to start."""
    asked = list(questions)
    given = f"[{json.dumps(str(CHART))}, [{', '.join(asked)}]]"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=given, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    _answers.update(zip(asked, json.loads(done.stdout), strict=True))


def objects(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects of a release with these values."""
    return [one for text in rendered(values).values() for one in yaml.safe_load_all(text) if one]


def containers(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The only container of each workload, by its name."""
    workloads = [one for one in found if one["kind"] in {"Deployment", "StatefulSet"}]
    made = [container for one in workloads for container in one["spec"]["template"]["spec"]["containers"]]
    assert len(made) == len(workloads)
    return {container["name"]: container for container in made}
