"""A sequence of four steps: client.py [HOST:PORT of a gateway's gRPC]."""

import shlex
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER.name
STEPS = [1.0, 2.0, 3.0, 4.0]

client = grpcclient.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "localhost:8001")
try:
    client.get_model_metadata(MODEL)
except InferenceServerException as error:
    command = shlex.join(["seqmesh", "up", "--models", str(FOLDER.parent)])
    sys.exit(f"{error.message()}. This starts a mesh with the model: {command}")
for index, number in enumerate(STEPS):
    x = grpcclient.InferInput("X", [1, 1], "FP32")
    x.set_data_from_numpy(np.array([[number]], np.float32))
    answer = client.infer(
        MODEL,
        [x],
        sequence_id=f"{MODEL}-1",
        sequence_start=index == 0,
        sequence_end=index == len(STEPS) - 1,
    )
    print(f"{number} -> {answer.as_numpy('Y').item():.4f}")
