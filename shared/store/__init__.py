"""What lies in Redis: the names of keys, scripts, records, and the rule for what cannot be read."""
