"""model-parameters.md: what is read of a model's configuration, with Triton's defaults, and its parameters."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from executor.configuration.fields import NOTED, REFUSED, SERVED
from executor.configuration.parameters import PARAMETERS
from shared.configuration.schema import CONFIG_DESCRIPTOR
from tests.docs.reference.markdown import code, page, table, text

INTRO = """
A model's `config.pbtxt` is Triton's `ModelConfig`. What the mesh does with it and how that compares with Triton:
[Triton's behaviour](../triton/behaviour.md). Fields that Triton does not have are marked with "Dialect":
[the dialect](../triton/dialect.md).
"""
SPELLING = """
A parameter is a name and a text. Numbers and booleans are texts, too:

```text
parameters { key: "checkpoint_interval" value { string_value: "8" } }
parameters { key: "fixed_shape" value { string_value: "true" } }
```

In the JSON of a load request: `"parameters": {"checkpoint_interval": {"string_value": "8"}}`. A value that is none of
the allowed ones refuses the model. A parameter that has no effect on the model is noted in the log at load. All other
parameters are the model's own: `python` models read them from `args["model_config"]`.
"""
FIELDS = """
The default is what holds where the field is not given; "required" means that the field must be given, or completed by
the backend (`auto_complete_config` of a `python` model, the signature of a `pytorch` model). A model with
`sequence_batching` and no strategy has `direct`.
"""
KINDS = {
    FieldDescriptor.TYPE_STRING: "text",
    FieldDescriptor.TYPE_BOOL: "boolean",
    FieldDescriptor.TYPE_FLOAT: "number",
    FieldDescriptor.TYPE_DOUBLE: "number",
    FieldDescriptor.TYPE_ENUM: "word",
    FieldDescriptor.TYPE_MESSAGE: "message",
}
"""By protobuf's type; all others are integers."""


def model_parameters() -> str:
    """The page."""
    parameters = [
        [code(one.name), text(one.of), text(one.values), code(one.default) or "none", text(one.meaning)]
        for one in PARAMETERS
    ]
    fields = [
        [code(path), kind_of(path), text(served.default) or "required", text(served.meaning)]
        for path, served in SERVED.items()
    ]
    return page(
        "Model parameters",
        INTRO,
        "## Parameters",
        SPELLING,
        table(("Parameter", "Of", "Value", "Default", "Meaning"), parameters),
        "## Fields",
        FIELDS,
        table(("Field", "Type", "Default", "Meaning"), fields),
        "## Fields without effect",
        "A model that sets one of them is served. The log says so at load.",
        table(("Field", "Why"), [[code(path), text(why)] for path, why in NOTED.items()]),
        "## Refused fields",
        "A model that sets one of them is not loaded.",
        table(("Field", "Why"), [[code(path), text(why)] for path, why in REFUSED.items()]),
    )


def kind_of(path: str) -> str:
    """A field's type in words."""
    descriptor: Descriptor | None = CONFIG_DESCRIPTOR
    field: FieldDescriptor | None = None
    for name in path.split("."):
        assert descriptor is not None, path
        field = descriptor.fields_by_name[name]
        descriptor = field.message_type
    assert field is not None, path
    if descriptor is not None and descriptor.GetOptions().map_entry:
        return "map"
    kind = KINDS.get(field.type, "integer")
    return f"list of {kind}s" if field.is_repeated else kind
