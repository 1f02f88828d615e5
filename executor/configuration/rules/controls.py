"""Rules of the control tensors of a sequence model, with Triton's messages.

Source: triton-spec section 1.2; Triton core, model_config_utils.cc (GetBooleanSequenceControlProperties,
GetTypedSequenceControlProperties).
"""

from __future__ import annotations

from executor.configuration.names import CONTROL_NAMES, TYPE_NAMES, Part
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError

_FALSE_TRUE = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRID_TYPES = frozenset({"TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING"})


def check_controls(config: ConfigMessage) -> None:
    """Every control has a tensor of its own, each kind comes once, and its values fit the kind.

    raises  ConfigError for the first broken rule
    """
    model = config.name
    tensors: set[str] = set()
    kinds: set[int] = set()
    for tensor in config.sequence_batching.control_input:
        if not tensor.name:
            raise ConfigError(f"sequence batching control tensor must have a name for {model}")
        if tensor.name in tensors:
            raise ConfigError(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for {model}"
            )
        tensors.add(tensor.name)
        for control in tensor.control:
            kind = CONTROL_NAMES.get(control.kind)
            if kind is None:
                raise ConfigError(f"sequence batching control tensor '{tensor.name}' has no known kind for {model}")
            if control.kind in kinds:
                raise ConfigError(f"sequence batching specifies multiple {kind} tensors for {model}")
            kinds.add(control.kind)
            _check_control(model, kind, control)


def _check_control(model: str, kind: str, control: Part) -> None:
    given = [name for name in _FALSE_TRUE if getattr(control, name)]
    either = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
    if kind == "CONTROL_SEQUENCE_CORRID":
        if given:
            raise ConfigError(f"sequence batching must not specify either {either} for {kind} for {model}")
        if TYPE_NAMES.get(control.data_type) not in _CORRID_TYPES:
            raise ConfigError(
                f"unexpected data type for control CONTROL_SEQUENCE_CORRID for {model}. Allowed data types are "
                "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    if not given:
        raise ConfigError(f"sequence batching must specify either {either} for {kind} for {model}")
    if len(given) > 1:
        more = "'int32_false_true', 'fp32_false_true' and 'bool_false_true'"
        raise ConfigError(f"sequence batching specifies more than one from {more} for {kind} for {model}")
    if len(getattr(control, given[0])) != 2:
        raise ConfigError(f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {model}")
