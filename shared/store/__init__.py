"""Redis: connections, the names of keys, scripts, and the rule for what cannot be read."""
