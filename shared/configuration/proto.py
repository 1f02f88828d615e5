"""Triton's real `inference.ModelConfig` message, for the gateway's ModelConfig rpc.

Imports nothing but protobuf, tritonclient and this package's parser.
"""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import model_config_pb2

from shared.configuration.parse import parse_json

# The class that `tritonclient` itself uses, found by its descriptor: generated modules have no types to import it by.
_CLASS = GetMessageClass(model_config_pb2.DESCRIPTOR.message_types_by_name["ModelConfig"])


@lru_cache(maxsize=64)
def config_proto(config_json: str) -> Message:
    """The `inference.ModelConfig` that an ordinary client understands, from the mesh's JSON of a configuration.

    What the dialect adds is left out. A model with both batchers is shown with its `sequence_batching` alone: the real
    message can hold only one, and that is the one which schedules.

    returns one message for all who ask, who leave it as it is: making it takes milliseconds, of a large configuration
            seconds
    raises  ConfigError when the text is no configuration
    """
    extended = parse_json(config_json)
    if extended.HasField("sequence_batching"):
        extended.ClearField("dynamic_batching")
    config = _CLASS.FromString(extended.SerializeToString())
    config.DiscardUnknownFields()
    return config
