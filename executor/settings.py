"""The settings of an executor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from shared.contract.locations import ModelLocation
from shared.settings import MetricsSettings, lease_setting, setting

ModelControlMode = Literal["none", "explicit", "poll"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings(MetricsSettings):
    """Models, device and the rhythm of the step loop."""

    models: tuple[ModelLocation, ...] = setting(
        (),
        help="Model repository in Triton's layout: a folder, or a URL of an object store "
        "(docs/guides/remote-repositories.md). May be repeated (in the environment: separated by ':').",
        unit="repository",
        group="Models",
        required=True,
    )
    model_control_mode: ModelControlMode = setting(
        "none",
        help="none: every model is loaded at the start. explicit: those of --load-model, others by request. poll: "
        "every model, and whatever changes in the repository's folders later.",
    )
    repository_poll_secs: float = setting(
        15.0,
        help="How often the folders are looked at in poll mode, and repositories elsewhere in explicit mode too. "
        "Triton's default is the same.",
        unit="s",
        minimum=0.1,
    )
    model_cache_dir: Path = setting(
        Path("~/.cache/seqmesh/models"),
        help="Where copies of the models of repositories elsewhere are kept. All executors of this machine may share "
        "it; it must be on a disk of this machine.",
        unit="dir",
    )
    model_cache_bytes: int = setting(
        16 << 30,
        help="Most bytes of these copies. A model that does not fit beside those in use is not loaded.",
        unit="bytes",
        minimum=1,
    )
    exit_on_error: bool = setting(
        default=False,
        help="End when a model cannot be loaded at the start. Triton does so by default; an executor that serves its "
        "other models is worth more to a mesh than one that is started again and again.",
    )
    backend_directory: tuple[Path, ...] = setting(
        (),
        help="Where backends have files of their own, each in a folder of its name: their batch strategies, or the "
        "model.py that is the backend. May be repeated (in the environment: separated by ':').",
        unit="dir",
    )
    load_model: tuple[str, ...] = setting(
        (),
        help="Model to load at the start in explicit mode; '*' for all. May be repeated (in the environment: "
        "separated by ',').",
        unit="model",
    )
    model_config_name: str = setting(
        "", help="Of a model that has configs/NAME.pbtxt, read that in place of its config.pbtxt.", unit="name"
    )
    disable_auto_complete_config: bool = setting(
        default=False, help="Models do not complete their configuration; each must have a config.pbtxt."
    )
    auto_complete_timeout_secs: float = setting(
        60.0,
        help="How long a python model's auto_complete_config may take, in a process of its own, with the start of that "
        "process and the model's imports.",
        unit="s",
        minimum=0.1,
    )
    gpu: str = setting(
        "auto",
        help="auto: a GPU where there is one. none: CPU only. Or the indexes to use, for instance 2,3; `gpus` in a "
        "model's configuration count among these, from 0.",
    )
    lease_ms: int = lease_setting()
    inbox_bytes_max: int = setting(
        256 << 20,
        help="Bytes of steps' requests that wait in this process for their turn. While there are more, and some of "
        "them can run, the rest stays in Redis.",
        unit="bytes",
        group="Step loop",
        minimum=1,
    )
    state_bytes_max: int = setting(
        256 << 20,
        help="Bytes of sequences' states that an instance of a model may hold, where the model declares states of a "
        "fixed size. It decides how many sequences the instance holds at once; beyond that, idle ones wait in Redis. "
        "0: as many as the model's configuration says.",
        unit="bytes",
        minimum=0,
    )
    batch_limit_s: float = setting(
        0.0,
        help="A model's call (a batch, or a state that is restored) that takes longer has hung. Then the executor "
        "gives its lease up, so that others take over at once, and ends, because a thread cannot be stopped. Whoever "
        "started the executor starts it again. Of an instance that is a process, that process alone ends. The limit "
        "must be longer than any batch may ever take. 0: off.",
        unit="s",
        minimum=0.0,
    )
    calls_through: tuple[str, ...] = setting(
        (),
        help="Gateway through which this executor's models call other models: grpc://HOST:PORT, or grpcs:// for TLS. "
        "May be repeated (in the environment: separated by ','). Without it: those that the mesh names, one on this "
        "machine first.",
        unit="URL",
        group="Calls between models",
    )
    call_timeout_secs: float = setting(
        300.0,
        help="How long a model's call of another model may take, with all the calls that follow from it. Then it is "
        "answered with an error.",
        unit="s",
        minimum=0.001,
    )
    call_header: tuple[str, ...] = setting(
        (),
        help="Metadata of calls between models, for gateways with --restricted-api: NAME=VALUE. May be repeated (in "
        "the environment: separated by ',').",
        unit="NAME=VALUE",
        secret=True,
    )
    call_root_cert: str = setting(
        "",
        help="Authorities (PEM) that sign the certificates of gateways whose gRPC port speaks TLS; without it, those "
        "of the system.",
        unit="file",
    )
    call_client_cert: str = setting(
        "",
        help="Certificate (PEM) that calls between models show to a gateway with --grpc-use-ssl-mutual.",
        unit="file",
    )
    call_client_key: str = setting("", help="Private key of --call-client-cert (PEM).", unit="file")
    drain_timeout_s: float = setting(
        10.0,
        help="Time to finish the running batch and hand sequences over when told to stop. Sequences whose state only "
        "their model has go on here for half of it; those that have not ended then are lost.",
        unit="s",
        group="Step loop",
        minimum=0.0,
    )

    def __post_init__(self) -> None:
        """Raises click.UsageError for texts that mean nothing, so that a process does not start with them."""
        MetricsSettings.__post_init__(self)
        if self.gpu not in ("auto", "none") and not all(index.strip().isdecimal() for index in self.gpu.split(",")):
            raise click.UsageError(f"--gpu must be auto, none or indexes such as 0,1, not '{self.gpu}'")
        if not all(re.match(r"grpcs?://.", address) for address in self.calls_through):
            raise click.UsageError("--calls-through must be grpc://HOST:PORT or grpcs://HOST:PORT")
        if not all("=" in header for header in self.call_header):
            raise click.UsageError("--call-header must be NAME=VALUE")

    @property
    def call_metadata(self) -> dict[str, str]:
        """`call_header`, read."""
        return dict(header.split("=", 1) for header in self.call_header)
