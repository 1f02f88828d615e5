"""Access control: parts of the protocols that need a secret header, and web pages that may use the HTTP ports."""
