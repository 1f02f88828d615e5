"""Labels and histogram buckets of a model's metrics: their rules, with Triton's messages, and their values.

Source: triton-spec section 4, "metric_tags, model_metrics"; Triton core, model_config_utils.cc (ValidateModelMetrics).
"""

from __future__ import annotations

import itertools
import re

from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError

_LABEL = re.compile(r"[a-zA-Z0-9_]+")
"""What may follow the underscore that a tag's label begins with."""


def check_metrics(config: ConfigMessage) -> None:
    """Every control names a family and gives buckets, rising; every tag can be a label.

    raises  ConfigError for the first broken rule
    """
    for tag in sorted(config.metric_tags):
        if not _LABEL.fullmatch(tag):
            raise ConfigError(f"metric tag '{tag}' must consist of letters, digits and underscores for {config.name}")
    for control in config.model_metrics.metric_control:
        if not control.HasField("metric_identifier"):
            raise ConfigError("metric control must specify 'metric_identifier'")
        family = control.metric_identifier.family
        if not family:
            raise ConfigError("metric identifier must specify non-empty 'family'")
        if not control.HasField("histogram_options"):
            raise ConfigError("metric control must specify 'histogram_options'")
        buckets = control.histogram_options.buckets
        if not buckets:
            raise ConfigError("histogram options must specify non-empty 'buckets'")
        if any(not lower < upper for lower, upper in itertools.pairwise(buckets)):
            raise ConfigError(f"histogram options must specify rising 'buckets' for family '{family}' of {config.name}")


def histogram_buckets(config: ConfigMessage) -> dict[str, tuple[float, ...]]:
    """Bucket bounds by family, in the order of their declaration; of a family that comes twice the later ones."""
    return {
        control.metric_identifier.family: tuple(control.histogram_options.buckets)
        for control in config.model_metrics.metric_control
    }
