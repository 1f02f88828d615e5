"""`seqmesh demo vad`: speech and pauses in recordings, found by Silero VAD on a mesh."""
