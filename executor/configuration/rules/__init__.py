"""The rules of a configuration, with Triton's messages: a module for each part, and `validate` for their order."""
