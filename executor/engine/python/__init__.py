"""The backend `python`: models written for Triton's Python backend."""
