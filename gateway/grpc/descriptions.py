"""Protobuf messages about models: metadata, index, statistics; and the parameters of load requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.grpc.pb import AnyMessage, pb
from gateway.models.metadata import platform_of, tensor_metadata
from shared.contract.errors import RequestError
from shared.contract.messages import ModelRecord, RepositoryEntry
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.statistics.tally import DURATIONS, BatchStatistics, Duration, ModelStatistics

FILE_PREFIX = "file:"


def model_metadata(record: ModelRecord, versions: Sequence[str]) -> AnyMessage:
    """ModelMetadataResponse."""
    config = record.config
    return pb.ModelMetadataResponse(
        name=config.name,
        versions=versions,
        platform=platform_of(config),
        inputs=[_tensor(config, spec) for spec in config.inputs],
        outputs=[_tensor(config, spec) for spec in config.outputs],
    )


def _tensor(config: ModelConfig, spec: TensorSpec) -> AnyMessage:
    shown = tensor_metadata(config, spec)
    return pb.ModelMetadataResponse.TensorMetadata(name=shown.name, datatype=shown.datatype, shape=shown.shape)


def repository_index(entries: Iterable[RepositoryEntry]) -> AnyMessage:
    """RepositoryIndexResponse."""
    return pb.RepositoryIndexResponse(
        models=[
            pb.RepositoryIndexResponse.ModelIndex(
                name=entry.model, version=entry.version, state=entry.state, reason=entry.reason
            )
            for entry in entries
        ]
    )


def model_statistics(statistics: Iterable[ModelStatistics]) -> AnyMessage:
    """ModelStatisticsResponse. `response_stats` stays empty: only decoupled models have any."""
    return pb.ModelStatisticsResponse(model_stats=[_statistics(entry) for entry in statistics])


def _statistics(entry: ModelStatistics) -> AnyMessage:
    durations = {name: _duration(entry.durations.get(name, Duration())) for name in DURATIONS}
    return pb.ModelStatistics(
        name=entry.name,
        version=entry.version,
        last_inference=entry.last_inference,
        inference_count=entry.inference_count,
        execution_count=entry.execution_count,
        inference_stats=pb.InferStatistics(**durations),
        batch_stats=[_batch(batch) for batch in entry.batches],
        memory_usage=[pb.MemoryUsage(type=use.type, id=use.id, byte_size=use.byte_size) for use in entry.memory_usage],
    )


def _batch(batch: BatchStatistics) -> AnyMessage:
    return pb.InferBatchStatistics(
        batch_size=batch.batch_size,
        compute_input=_duration(batch.compute_input),
        compute_infer=_duration(batch.compute_infer),
        compute_output=_duration(batch.compute_output),
    )


def _duration(duration: Duration) -> AnyMessage:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)


def load_parameters(parameters: Mapping[str, AnyMessage]) -> tuple[str, dict[str, bytes]]:
    """The configuration and files that a load request sends to replace the repository's.

    returns  the configuration's JSON, "" for none; path below the model's directory -> content, {} for none
    raises   RequestError for an unknown parameter, or one of the wrong type
    """
    config_json = ""
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            check_choice(key, value, "string_param")
            config_json = value.string_param
        elif key.startswith(FILE_PREFIX):
            check_choice(key, value, "bytes_param")
            files[key.removeprefix(FILE_PREFIX)] = value.bytes_param
        else:
            raise RequestError(f"unrecognized load parameter '{key}'.")
    return config_json, files


def check_choice(key: str, parameter: AnyMessage, choice: str) -> None:
    """Raises RequestError when a load parameter is not of its type."""
    if parameter.WhichOneof("parameter_choice") != choice:
        raise RequestError(f"invalid value type for load parameter '{key}', expected {choice}.")


def check_unload_parameters(parameters: Mapping[str, AnyMessage]) -> None:
    """Checks the type of `unload_dependents`. It has no effect: without ensembles no model has dependents.

    Other parameters are ignored, as in Triton.
    """
    for key, value in parameters.items():
        if key == "unload_dependents" and value.WhichOneof("parameter_choice") != "bool_param":
            raise RequestError("invalid value type for 'unload_dependents' parameter, expected bool_param.")
