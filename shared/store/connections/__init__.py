"""How Redis is reached: where it is, whether it is fit, and links to it. Nothing here knows a script or a record."""
