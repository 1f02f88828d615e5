"""Warns in the log which parts of a gateway are open to every client that reaches it.

As in Triton, everything is open by default. One exception: a client that loads a model with files of its own runs code
in the executors. On an address beyond loopback this is off, unless the operator allows it or restricts the model
repository to clients with a secret header.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.models.catalog import Catalog
from gateway.models.repository import EXPLICIT
from gateway.restrictions import SEQUENCES, Restriction
from gateway.settings import GatewaySettings
from shared.process import logs

CONTROL = "model-repository"
CHANGING = (CONTROL, "logging", "trace")
"""Parts of the protocols that change the whole mesh."""
MEMORY = "shared-memory"
"""The part by which a client names files of the gateway's machine, if it may."""
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Exposure:
    """What is open on a gateway. is_loopback: only this machine reaches it."""

    settings: GatewaySettings
    is_loopback: bool

    @property
    def open_parts(self) -> list[str]:
        """The parts that change the mesh, or touch this machine's memory, and need no secret header over both ports."""
        http, grpc = self.settings.http_restrictions, self.settings.grpc_restrictions
        parts = (*CHANGING, *((MEMORY,) if self.settings.allow_client_shm else ()))
        return [part for part in parts if part not in http or part not in grpc]

    def takes_overrides(self, restrictions: Mapping[str, Restriction]) -> bool:
        """Whether a port with these restrictions loads models with a client's own configuration and files."""
        return self.is_loopback or self.settings.allow_load_overrides or CONTROL in restrictions

    def shows_sequences(self, restrictions: Mapping[str, Restriction]) -> bool:
        """Whether a port with these restrictions lists sequences. Whoever knows an id can go on with its sequence."""
        return self.is_loopback or SEQUENCES in restrictions

    def warn(self) -> None:
        """Logs which parts every client may change, if the gateway listens beyond loopback."""
        if self.open_parts and not self.is_loopback:
            logs.warning(
                "OPEN TO EVERYBODY WHO REACHES THIS GATEWAY",
                host=self.settings.host,
                parts=",".join(self.open_parts),
                remedy="--restricted-api '<parts>:<header>=<secret>'",
            )

    async def warn_of_model_control(self, catalog: Catalog) -> None:
        """Logs that every client may load models, as soon as an executor lives that loads on request."""
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
