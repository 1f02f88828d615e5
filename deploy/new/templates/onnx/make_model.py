"""Writes 1/model.onnx. Put an export of your own model here (torch.onnx.export, for instance), and run this again."""

from pathlib import Path

from onnx import TensorProto, helper, save

FLOAT = TensorProto.FLOAT


def value(name: str):
    """A tensor with a row for each sequence that has a step in this call."""
    return helper.make_tensor_value_info(name, FLOAT, ["batch", 1])


nodes = [
    helper.make_node("Add", ["X", "STATE_IN"], ["SUM"]),
    helper.make_node("Mul", ["SUM", "HALF"], ["Y"]),
    helper.make_node("Identity", ["Y"], ["STATE_OUT"]),
]
half = helper.make_tensor("HALF", FLOAT, [], [0.5])
graph = helper.make_graph(nodes, "smoother", [value("X"), value("STATE_IN")], [value("Y"), value("STATE_OUT")], [half])

file = Path(__file__).parent / "1" / "model.onnx"
file.parent.mkdir(exist_ok=True)
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(file))
