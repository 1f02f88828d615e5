"""How a model of this executor calls another model: through a gateway, as any client does."""
