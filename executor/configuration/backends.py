"""Which backend serves a model: from `backend`, from `platform`, or from the files in a version directory.

Source: triton-spec section 4, "backend/platform"; Triton core, model_config_utils.cc (AutoCompleteBackendFields).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError

FILE_BACKENDS: dict[str, str] = {
    "model.graphdef": "tensorflow",
    "model.savedmodel": "tensorflow",
    "model.plan": "tensorrt",
    "model.onnx": "onnxruntime",
    "model.xml": "openvino",
    "model.pt": "pytorch",
    "model.pt2": "pytorch",
    "model.py": "python",
}
"""Model file -> backend, in Triton's order of choice. `model.pt2`, an exported program, is the mesh's own."""

PLATFORM_BACKENDS: dict[str, str] = {
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
}
"""Triton's older way to name a backend."""

BACKEND_PLATFORMS: dict[str, str] = {
    "pytorch": "pytorch_libtorch",
    "onnxruntime": "onnxruntime_onnx",
    "tensorflow": "tensorflow_savedmodel",
    "tensorrt": "tensorrt_plan",
}
"""The platform that Triton fills in for a backend."""

PLATFORM_FILES: dict[str, str] = {"tensorflow_savedmodel": "model.savedmodel", "tensorflow_graphdef": "model.graphdef"}
"""The default file of a platform, where its backend has several kinds of files."""

EXTRAS: dict[str, str] = {
    "pytorch": "executor",
    "onnxruntime": "executor",
    "openvino": "openvino",
    "tensorflow": "tensorflow",
}
"""The extra of the package that brings a backend."""


def remedy_of(backend: str) -> str:
    """What to do about a backend of that name that is not installed: the end of a message; "" if nothing is known."""
    if backend in EXTRAS:
        return f"; install it where the executor runs: pip install 'seqmesh[{EXTRAS[backend]}]'"
    if backend == "tensorrt":
        return (
            "; the mesh has no backend of its own for TensorRT: serve the model as ONNX, or install a package that "
            "announces 'tensorrt' (docs/guides/backends.md)"
        )
    return ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a configuration's defaults depend on, beside the configuration itself.

    directory  name of the model's directory
    files      names of the files in the version directory
    backends   names of the installed backends
    gpu_count  GPUs of this executor
    """

    directory: str
    files: frozenset[str]
    backends: frozenset[str]
    gpu_count: int = 0


def fill_backend(config: ConfigMessage, around: Surroundings) -> list[str]:
    """Fills `backend`, `platform` and `default_model_filename`, in place; returns notes.

    A model of a platform that is not installed, or whose own file is missing, is served by an installed backend, if a
    file of that backend lies in the version directory.

    raises  ConfigError if no backend can be found, or if it is not installed (with the list of the installed ones)
    """
    if not config.backend:
        config.backend = _backend_of(config, around)
    _check_installed(config, around)
    if not config.default_model_filename:
        config.default_model_filename = _filename_of(config, around.files)
    if not config.platform:
        config.platform = _platform_of(config)
    return _review_platform(config, around)


def _backend_of(config: ConfigMessage, around: Surroundings) -> str:
    if config.platform:
        native, other = PLATFORM_BACKENDS.get(config.platform, ""), _stand_in(config, around)
        if native in around.backends and (other is None or _has_own_file(config, around.files)):
            return native
        return other or _refuse_platform(config, around)
    candidates = {config.default_model_filename} if config.default_model_filename else around.files
    told = [backend for file, backend in FILE_BACKENDS.items() if file in candidates and file in around.files]
    if told:
        return next((backend for backend in told if backend in around.backends), told[0])
    _, _, suffix = config.name.partition(".")
    if suffix:
        return suffix
    raise ConfigError(
        f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'."
    )


def _has_own_file(config: ConfigMessage, files: frozenset[str]) -> bool:
    """Whether a model of an installed platform should be served by it, as far as files tell that."""
    if config.platform not in PLATFORM_FILES:
        return True
    wanted = config.default_model_filename or PLATFORM_FILES[config.platform]
    native = PLATFORM_BACKENDS[config.platform]
    return wanted in files and FILE_BACKENDS.get(wanted, native) == native


def _stand_in(config: ConfigMessage, around: Surroundings) -> str | None:
    """An installed backend whose file is there, for a platform that cannot serve the model."""
    for file, backend in FILE_BACKENDS.items():
        if file in around.files and backend in around.backends and config.default_model_filename in ("", file):
            return backend
    return None


def _refuse_platform(config: ConfigMessage, around: Surroundings) -> NoReturn:
    if config.platform not in PLATFORM_BACKENDS:
        raise ConfigError(f"unexpected platform type '{config.platform}' for {config.name}; {_installed(around)}")
    raise ConfigError(
        f"platform '{config.platform}' of model '{config.name}' is not installed, and no file of an installed backend "
        f"stands in for it; {_installed(around)}{remedy_of(PLATFORM_BACKENDS[config.platform])}"
    )


def _check_installed(config: ConfigMessage, around: Surroundings) -> None:
    if config.backend not in around.backends:
        raise ConfigError(
            f"unable to find backend '{config.backend}' for model '{config.name}'; {_installed(around)}"
            f"{remedy_of(config.backend)}"
        )


def _installed(around: Surroundings) -> str:
    names: Iterable[str] = (
        f"{backend} (platform {BACKEND_PLATFORMS[backend]})" if backend in BACKEND_PLATFORMS else backend
        for backend in sorted(around.backends)
    )
    return f"installed backends: {', '.join(names) or 'none'}"


def _filename_of(config: ConfigMessage, files: frozenset[str]) -> str:
    """The backend's file that exists; if none does, that of its usual platform, or the first name that the backend
    knows; `model.<backend>` for an unknown backend.
    """
    backend = config.backend
    if PLATFORM_BACKENDS.get(config.platform) == backend and config.platform in PLATFORM_FILES:
        return PLATFORM_FILES[config.platform]
    known = [file for file, name in FILE_BACKENDS.items() if name == backend]
    usual = PLATFORM_FILES.get(BACKEND_PLATFORMS.get(backend, "")) or next(iter(known), f"model.{backend}")
    return next((file for file in known if file in files), usual)


def _platform_of(config: ConfigMessage) -> str:
    for platform, file in PLATFORM_FILES.items():
        if PLATFORM_BACKENDS[platform] == config.backend and file == config.default_model_filename:
            return platform
    return BACKEND_PLATFORMS.get(config.backend, "")


def _review_platform(config: ConfigMessage, around: Surroundings) -> list[str]:
    native, file = PLATFORM_BACKENDS.get(config.platform), config.default_model_filename
    if config.platform and native != config.backend:
        if native not in around.backends:
            if native is None and config.backend not in PLATFORM_BACKENDS.values():
                return []  # Neither is known to Triton: a backend of the user's own may call its platform as it likes.
            return [f"platform {config.platform} is not installed; serving {file} with {config.backend}"]
        if not _has_own_file(config, around.files):
            return [f"platform {config.platform} has no file here; serving {file} with {config.backend}"]
        if config.backend not in PLATFORM_BACKENDS.values():
            return [f"platform {config.platform} has no effect: the backend is {config.backend}"]
    if config.backend in PLATFORM_BACKENDS.values() and native != config.backend:
        raise ConfigError(f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}")
    return []
