"""What the services agree on, without input or output: ids, errors, limits, messages, tensors, the meaning of a
configuration."""
