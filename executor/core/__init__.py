"""What the executor decides, without streams, clocks or tensors of its own: order, batches, controls."""
