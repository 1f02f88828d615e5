"""What the backends share whose runtime opens a model as a session with named inputs and outputs."""
