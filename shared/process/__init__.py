"""What all processes of the mesh do in the same way: logging, starting and stopping."""
