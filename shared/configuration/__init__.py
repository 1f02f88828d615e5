"""How a model's configuration is written: Triton's message with the dialect, and its parser."""
