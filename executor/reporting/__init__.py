"""What an executor tells of itself: memory, hardware, what waits, the times of its batches."""
