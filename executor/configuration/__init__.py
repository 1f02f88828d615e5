"""The compiler of model configurations: from `config.pbtxt` to `shared.contract.model_config`, with every check of
Triton."""
