"""What of a gateway is open to everybody who reaches it: said in the log, for nobody finds out otherwise.

Triton opens everything, so a mesh does. But whoever may load a model with files of his own runs code in the executors:
beyond a loopback address that is off, unless an operator allows it or closes the model repository with a header.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.access.restrictions import Restriction
from gateway.models.catalog import Catalog
from gateway.models.repository import EXPLICIT
from gateway.settings import GatewaySettings
from shared.process import logs

CONTROL = "model-repository"
CHANGING = (CONTROL, "logging", "trace")
"""Parts of the protocols that change the whole mesh."""
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Exposure:
    """is_loopback: nobody but this machine reaches the gateway."""

    settings: GatewaySettings
    is_loopback: bool

    @property
    def open_parts(self) -> list[str]:
        """Those that change the mesh, and need no header over HTTP or over gRPC."""
        http, grpc = self.settings.http_restrictions, self.settings.grpc_restrictions
        return [part for part in CHANGING if part not in http or part not in grpc]

    def takes_overrides(self, restrictions: Mapping[str, Restriction]) -> bool:
        """Whether a port with these restrictions loads models with configurations and files that callers bring."""
        return self.is_loopback or self.settings.allow_load_overrides or CONTROL in restrictions

    def warn(self) -> None:
        """Says what everybody may change who reaches a gateway beyond loopback."""
        if self.open_parts and not self.is_loopback:
            logs.warning(
                "OPEN TO EVERYBODY WHO REACHES THIS GATEWAY",
                host=self.settings.host,
                parts=",".join(self.open_parts),
                remedy="--restricted-api '<parts>:<header>=<secret>'",
            )

    async def warn_of_model_control(self, catalog: Catalog) -> None:
        """Says, once there are executors that load on request, that everybody may ask them to."""
        if CONTROL not in self.open_parts:
            return
        while not any(  # noqa: ASYNC110 - the catalog is looked at, by whoever asks
            member.registration.control_mode == EXPLICIT for member in catalog.live_members()
        ):
            await asyncio.sleep(LOOK_S)
        ports = (self.settings.http_restrictions, self.settings.grpc_restrictions)
        code = any(CONTROL not in port and self.takes_overrides(port) for port in ports)
        logs.warning(
            "OPEN MODEL CONTROL: WHO REACHES THIS GATEWAY MAY LOAD AND UNLOAD MODELS"
            + (", AND RUN CODE IN THE EXECUTORS" if code else ""),
            host=self.settings.host,
            remedy=f"--restricted-api '{CONTROL}:<header>=<secret>'",
        )
