"""The protobuf message that a configuration is parsed into: Triton's `ModelConfig`, extended by the dialect
(docs/triton/dialect.md).

The file descriptor of the installed `tritonclient` is copied, the dialect's fields are added to the copy, and classes
are made from it in a private pool. So a canonical configuration means here exactly what it means to Triton, a dialect
field is a field like any other (types and misspellings are checked by protobuf itself), and the real classes, which the
gateway speaks gRPC with, stay as they are. Field numbers of the dialect begin at 50001, out of reach of Triton's own;
the wire form of everything else is the same in both.

`dynamic_batching` leaves the `scheduling_choice` oneof, because the dialect writes it beside `sequence_batching`.
"""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

ConfigMessage = Any
"""A message of the extended `inference.ModelConfig`. Its class is made at run time, so no checker knows its fields."""

FIRST_DIALECT_FIELD = 50001


def _add_field(
    message: DescriptorProto, name: str, field_type: FieldDescriptorProto.Type.ValueType, type_name: str = ""
) -> None:
    """Adds one optional field whose presence is kept, so that a dialect field is printed only where it was given."""
    field = message.field.add(name=name, type=field_type, label=FieldDescriptorProto.LABEL_OPTIONAL)
    field.number = FIRST_DIALECT_FIELD + sum(f.number >= FIRST_DIALECT_FIELD for f in message.field)
    if type_name:
        field.type_name = type_name
    if field_type != FieldDescriptorProto.TYPE_MESSAGE:
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _add_timeout_actions(file: FileDescriptorProto) -> None:
    actions = file.enum_type.add(name="DialectTimeoutAction")
    for number, name in enumerate(("TIMEOUT_UNSPECIFIED", "TIMEOUT_REJECT", "TIMEOUT_COMPLETE")):
        actions.value.add(name=name, number=number)


def _add_reusable_batch(sequence_batching: DescriptorProto) -> None:
    batch = sequence_batching.nested_type.add(name="ReusableBatch")
    _add_field(batch, "max_size", FieldDescriptorProto.TYPE_INT32)
    batch.field.add(
        name="candidate_batch_size",
        number=FIRST_DIALECT_FIELD + 100,
        type=FieldDescriptorProto.TYPE_INT32,
        label=FieldDescriptorProto.LABEL_REPEATED,
    )
    _add_field(
        sequence_batching,
        "reusable_batch",
        FieldDescriptorProto.TYPE_MESSAGE,
        ".inference.ModelSequenceBatching.ReusableBatch",
    )


def _add_stateful_model_policy(transaction_policy: DescriptorProto) -> None:
    policy = transaction_policy.nested_type.add(name="StatefulModelPolicy")
    actions = policy.enum_type.add(name="TimeoutAction")
    for number, name in enumerate(("UNSPECIFIED", "DESCRIBE")):
        actions.value.add(name=name, number=number)
    scope = ".inference.ModelTransactionPolicy.StatefulModelPolicy"
    _add_field(policy, "timeout_action", FieldDescriptorProto.TYPE_ENUM, f"{scope}.TimeoutAction")
    _add_field(transaction_policy, "stateful_model_policy", FieldDescriptorProto.TYPE_MESSAGE, scope)


def _triton_file() -> FileDescriptorProto:
    """Triton's `model_config.proto`, from the module that protoc has made of it.

    The module is run by its path: to import it by its name imports tritonclient's client and grpc as well, a tenth of
    an executor's start and 12 MB of its memory, for which it has no use.
    """
    package = find_spec("tritonclient")
    assert package is not None and package.submodule_search_locations, "tritonclient is installed"
    path = Path(package.submodule_search_locations[0], "grpc", "model_config_pb2.py")
    spec = spec_from_file_location("model_config_pb2", path)
    assert spec is not None and spec.loader is not None, path
    generated = module_from_spec(spec)
    spec.loader.exec_module(generated)
    file = FileDescriptorProto()
    generated.DESCRIPTOR.CopyToProto(file)
    return file


def _extended_file() -> FileDescriptorProto:
    """Triton's `model_config.proto` with the dialect's fields in it."""
    file = _triton_file()
    messages = {message.name: message for message in file.message_type}
    sequence_batching = messages["ModelSequenceBatching"]
    _add_timeout_actions(file)
    for batching in (messages["ModelDynamicBatching"], sequence_batching):
        _add_field(batching, "default_batch_size", FieldDescriptorProto.TYPE_INT32)
        _add_field(batching, "timeout_action", FieldDescriptorProto.TYPE_ENUM, ".inference.DialectTimeoutAction")
    _add_reusable_batch(sequence_batching)
    state = next(nested for nested in sequence_batching.nested_type if nested.name == "State")
    _add_field(state, "name", FieldDescriptorProto.TYPE_STRING)
    _add_stateful_model_policy(messages["ModelTransactionPolicy"])
    dynamic_batching = next(field for field in messages["ModelConfig"].field if field.name == "dynamic_batching")
    dynamic_batching.ClearField("oneof_index")
    return file


POOL = DescriptorPool()
"""Holds the extended file alone; the default pool, with Triton's own, is never touched."""

POOL.Add(_extended_file())  # type: ignore[no-untyped-call]

CONFIG_DESCRIPTOR = POOL.FindMessageTypeByName("inference.ModelConfig")

_config_class = GetMessageClass(CONFIG_DESCRIPTOR)


def new_config() -> ConfigMessage:
    return _config_class()


def is_dialect(config: ConfigMessage) -> bool:
    """Whether the configuration contains anything that Triton itself would not parse.

    `gpus` on a KIND_CPU group does not count: Triton parses that, and refuses it with a message of its own.
    """
    dynamic, sequence = config.dynamic_batching, config.sequence_batching
    return (
        config.model_transaction_policy.HasField("stateful_model_policy")
        or sequence.HasField("reusable_batch")
        or (config.HasField("dynamic_batching") and config.HasField("sequence_batching"))
        or any(batching.HasField(name) for batching in (dynamic, sequence) for name in _BATCHING_FIELDS)
        or any(state.HasField("name") for state in sequence.state)
    )


_BATCHING_FIELDS = ("default_batch_size", "timeout_action")
