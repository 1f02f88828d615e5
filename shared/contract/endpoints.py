"""The ways by which a request for inference comes."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    """By which way a request came. Its text is the caller's name in Triton's refusal of decoupled models."""

    INFER = "HTTP end point"
    GENERATE = "HTTP generate end point"
    MODEL_INFER = "ModelInfer RPC"
    MODEL_STREAM_INFER = "ModelStreamInfer RPC"
