"""The life of a request: `admission` checks it, `dispatch` sends it to Redis, `replies` brings its answer."""
