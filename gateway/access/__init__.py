"""Who may ask for what: restricted APIs, and the origins of browsers."""
