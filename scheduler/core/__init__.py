"""The scheduler's decisions for one model: plain code over (state, event), no Redis, no clock, no chance."""
