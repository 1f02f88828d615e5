"""This release, and the format of data in Redis that it speaks. The rule stands in docs/guides/upgrading.md.

A format is `<schema>.<revision>`. Services of one schema may run beside each other, whatever their revisions: within a
schema, fields, kinds of keys and words are only added, in a way that older services can ignore. Any other change is a
new schema (`keyspace.SCHEMA_VERSION`), and services of two schemas do not run in one mesh.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from shared.store.keyspace import SCHEMA_VERSION

REVISION = 1
"""Grows with each release that adds something within the schema; 0 is what tests/fixtures/formats/2 holds."""

FORMAT = f"{SCHEMA_VERSION}.{REVISION}"


def installed_release() -> str:
    """The installed release; "0" when running from a source tree that was never installed."""
    try:
        return version("seqmesh")
    except PackageNotFoundError:
        return "0"


RELEASE = installed_release()
