"""An instance of a python model in a process of its own."""
