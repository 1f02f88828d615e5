"""`make reference`: writes what of the chart follows from the code, and the plain manifests."""

from __future__ import annotations

from tests.deploy.kubernetes.generated import write

write()
