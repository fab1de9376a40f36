"""Where a conversation starts: rows, their order, images and videos in columns."""
