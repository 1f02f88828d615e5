"""What one gateway may hold at a time: bytes of requests, unread answers, file descriptors."""
