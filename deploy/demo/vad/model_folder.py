"""The repository of the demo: Silero VAD's file as its package ships it, and a configuration for it."""

from __future__ import annotations

from pathlib import Path

from deploy.demo.vad.packages import model_bytes

MODEL = "silero_vad"
CONFIG = """\
# Silero VAD: whether 32 ms of sound at 16 kHz have speech in them. Its memory of the recording is a state.
name: "silero_vad"
platform: "onnxruntime_onnx"
# Dimension 0 of the state is not the batch, so every row is a call of its own.
max_batch_size: 0
input [
  { name: "input" data_type: TYPE_FP32 dims: [ 1, 576 ] },  # 4 ms of the piece before, then 32 ms
  { name: "sr" data_type: TYPE_INT64 dims: [ 1 ] }          # 16000; a scalar in the model
]
output [ { name: "output" data_type: TYPE_FP32 dims: [ 1, 1 ] } ]
sequence_batching {
  oldest { max_candidate_sequences: 16 }
  max_sequence_idle_microseconds: 60000000
  state [ { input_name: "state" output_name: "stateN" data_type: TYPE_FP32 dims: [ 2, 1, 128 ] } ]
}
instance_group [ { kind: KIND_CPU } ]
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""


def write_repository(directory: Path) -> Path:
    """Writes the repository into a directory. Returns the directory."""
    version = directory / MODEL / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(model_bytes())
    (directory / MODEL / "config.pbtxt").write_text(CONFIG)
    return directory
