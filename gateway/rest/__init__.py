"""The v2 protocol over HTTP: pure codecs, and the Starlette application that uses them."""
