"""The life of a request, from what a caller sent (`admission`) over its way to Redis (`dispatch`) to its answer
(`replies`)."""
