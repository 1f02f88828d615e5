"""The scheduler's decisions for one model: plain functions of state and event. No Redis, no clock, no randomness."""
